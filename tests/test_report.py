"""Tables and plots from run folders that are written by hand."""

import itertools
import json
import struct
import sys

import pytest

from sparse_lm import figures, report
from sparse_lm.errors import UserError


def write_run(folder, entries, *, ffn_width=200, coefficient=0.0, steps=None, sparsity=None):
  """A run's folder; finished, unless `steps` says that more were wanted."""
  folder.mkdir(parents=True)
  config = {
    "model": {"ffn_width": ffn_width},
    "sparsity": {"l1_coefficient": coefficient, "target_l0": None},
    "training": {"steps": steps or entries[-1]["step"]},
  }
  (folder / "config.json").write_text(json.dumps(config))
  (folder / "env.json").write_text(json.dumps({"device": {"kind": "cpu"}}))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
  if sparsity is not None:
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "activity.json").write_text(json.dumps(sparsity))
  return folder


def entries_of(*, loss, speeds, coefficient=0.0, l0=None, dead=0.0):
  """One entry a speed; validation in the last one alone."""
  entries = []
  for n, speed in enumerate(speeds):
    entry = {"step": 10 * (n + 1), "cross_entropy": loss + 1.0 / (n + 1), "tokens_per_second": speed}
    entry["l1_coefficient"] = coefficient
    if l0 is not None:
      entry |= {"l0": l0 * (4 - n), "dead": dead}
    entries.append(entry)
  entries[-1]["validation_loss"] = loss
  if l0 is not None:
    entries[-1] |= {
      "validation_l0": l0,
      "validation_zeros": 1 - l0 / 200,
      "validation_l0_per_layer": [l0 / 2, 3 * l0 / 2],
    }
  return entries


@pytest.fixture
def runs(tmp_path):
  """A dense run, a sparse one, and one that has no neurons."""
  folders = {
    "dense": entries_of(loss=4.0, speeds=[1, 2000, 3000], l0=100.0),
    "sparse": entries_of(loss=4.1, speeds=[1000, 1500, 9e9], coefficient=0.00123456, l0=12.5, dead=0.25),
    "no FFN": entries_of(loss=5.0, speeds=[12345.6]),
  }
  folders["sparse"][-1]["peak_device_bytes"] = 3 << 30  # a CPU has none
  return {name: report.read_run(write_run(tmp_path / name, entries)) for name, entries in folders.items()}


def cells(table):
  return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]


def test_table_has_a_row_a_run_with_losses_against_the_baseline_and_the_median_speed(runs):
  header, _, dense, sparse, none = cells(report.markdown_table(runs, baseline="dense"))
  assert header[3] == "against dense"
  assert dense == ["dense", "0", "4.0000", "+0.0%", "100.0 of 200", "50.0%", "0.0%", "2,000", "-"]
  assert sparse == ["sparse", "0.00123", "4.1000", "+2.5%", "12.5 of 200", "93.8%", "25.0%", "1,500", "3.0 GiB"]
  assert none == ["no FFN", "0", "5.0000", "+25.0%", "-", "-", "-", "12,346", "-"]


def test_a_table_without_speed_lacks_the_last_two_columns_alone(runs):
  whole, without = (
    cells(report.markdown_table(runs, baseline="dense", with_speed=with_speed)) for with_speed in (True, False)
  )
  assert without == [row[:-2] for row in whole]


def test_every_row_has_as_many_cells_as_the_header(runs):
  assert len({len(row) for row in cells(report.markdown_table(runs, baseline="dense"))}) == 1


def test_another_baseline_turns_the_comparison_around(runs):
  _, _, dense, sparse, _ = cells(report.markdown_table(runs, baseline="sparse"))
  assert (dense[3], sparse[3]) == ("-2.4%", "+0.0%")


def test_a_run_that_was_cut_in_its_last_line_counts_as_unfinished(tmp_path):
  folder = write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1, 2], l0=3.0))
  metrics = folder / "metrics.jsonl"
  metrics.write_text(metrics.read_text()[:-5])
  run = report.read_run(folder)
  assert not run.finished
  with pytest.raises(UserError, match="run 'cut' is at step 10 of 20"):
    report.markdown_table({"cut": run}, baseline="cut")


def test_a_run_that_was_validated_and_stopped_before_its_end_is_unfinished(tmp_path):
  run = report.read_run(write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1, 2]), steps=30))
  with pytest.raises(UserError, match="run 'half' is at step 20 of 30"):
    report.markdown_table({"half": run}, baseline="half")


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_folder_that_holds_no_run_is_named(tmp_path, kind):
  if kind == "empty":
    (tmp_path / "nothing").mkdir()
  with pytest.raises(UserError, match="nothing holds no run "):
    report.read_run(tmp_path / "nothing")
  with pytest.raises(UserError, match="nothing holds no runs "):
    report.read_runs(tmp_path / "nothing")


def test_runs_of_a_folder_are_read_by_name_and_other_folders_are_passed_over(tmp_path):
  write_run(tmp_path / "b", entries_of(loss=4.0, speeds=[1]))
  write_run(tmp_path / "a", entries_of(loss=3.0, speeds=[1]))
  (tmp_path / "compiled").mkdir()
  assert {name: run.last["validation_loss"] for name, run in report.read_runs(tmp_path).items()} == {"a": 3.0, "b": 4.0}


@pytest.mark.parametrize("name", ["config.json", "env.json"])
def test_a_run_without_its_config_or_environment_is_refused_by_the_name_of_the_file(tmp_path, name):
  folder = write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1]))
  (folder / name).unlink()
  with pytest.raises(UserError, match=name):
    report.read_run(folder)


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-inf"])
def test_numbers_that_json_lacks_are_read_back_wherever_they_stand(tmp_path, text):
  entries = entries_of(loss=4.0, speeds=[1])
  entries[0] |= {"cross_entropy": text, "l0_per_layer": [1.0, text], "kind": "nanny"}
  last = report.read_run(write_run(tmp_path / "run", entries)).last
  for value in (last["cross_entropy"], last["l0_per_layer"][1]):
    assert isinstance(value, float)
    assert repr(value) == text.lower()
  assert (last["l0_per_layer"][0], last["kind"]) == (1.0, "nanny")


# Plots.


def png_size(path):
  """Width and height from the header chunk, after a check of the signature."""
  content = path.read_bytes()
  assert content[:8] == b"\x89PNG\r\n\x1a\n"
  assert content[12:16] == b"IHDR"
  assert content.rstrip().endswith(b"IEND\xaeB`\x82")
  return struct.unpack(">II", content[16:24]), len(content)


@pytest.fixture
def drawn(monkeypatch):
  """Figures in the order in which they were drawn, still open; no file is written, which takes most of the time."""
  pyplot = pytest.importorskip("matplotlib.pyplot")
  figures = []
  with monkeypatch.context() as patch:
    patch.setattr(pyplot, "close", figures.append)
    patch.setattr(pyplot.Figure, "savefig", lambda *arguments, **options: None)
    yield figures
  for figure in figures:
    pyplot.close(figure)


def legend(axes):
  return [text.get_text() for text in axes.get_legend().get_texts()]


def points(line):
  return list(line.get_xdata()), list(line.get_ydata())


def test_plots_are_png_files_with_something_in_them(runs, tmp_path):
  pytest.importorskip("matplotlib")
  paths = figures.comparison(runs, tmp_path)
  assert [path.name for path in paths] == ["loss.png", "l0.png", "l0_per_layer.png"]
  for path in paths:
    (width, height), size = png_size(path)
    assert width > 600, path
    assert height > 400, path
    assert size > 10_000, path


def test_plots_show_losses_of_every_run_and_neurons_of_those_that_have_some(runs, tmp_path, drawn):
  figures.comparison(runs, tmp_path)
  labels = [legend(figure.axes[0]) for figure in drawn]
  assert labels == [["dense", "sparse", "no FFN"], ["dense", "sparse"], ["dense", "sparse"]]
  training, validation = drawn[0].axes[0].lines[:2]
  assert points(training) == ([10, 20, 30], [5.0, 4.5, 4.0 + 1 / 3])
  assert points(validation) == ([30], [4.0])
  assert points(drawn[2].axes[0].lines[1]) == ([1, 2], [6.25, 18.75])


def test_a_loss_that_was_nan_is_drawn_as_a_gap(tmp_path, drawn):
  """metrics.jsonl holds NaN as a string."""
  entries = entries_of(loss=4.0, speeds=[1, 2, 3], l0=5.0)
  entries[1]["cross_entropy"] = "nan"
  run = report.read_run(write_run(tmp_path / "run", entries))
  assert len(figures.comparison({"run": run}, tmp_path)) == 3
  assert str(drawn[0].axes[0].lines[0].get_ydata()[1]) == "nan"


def test_runs_without_any_neurons_can_be_plotted(tmp_path):
  pytest.importorskip("matplotlib")
  run = report.read_run(write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1, 2])))
  paths = figures.comparison({"run": run}, tmp_path)
  assert [path.name for path in paths] == ["loss.png"]  # an empty plot of neurons says nothing
  for path in paths:
    png_size(path)


def test_plots_without_matplotlib_say_what_to_install(runs, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(UserError, match="plots need the package matplotlib"):
    figures.comparison(runs, tmp_path)


# The paper's figures.

SPARSITY = {
  "step": 30,
  "tokens": 4096,
  "ffn_width": 200,
  "l0_per_layer": [10.0, 20.0, 0.5],
  "l0_max_per_layer": [100, 150, 40],
  "l0_by_position": [64.0, 32.0, 16.0, 8.0],
  "fewest": [{"token": " doesn", "count": 9, "l0": 1.5}, {"token": "$x_1$", "count": 3, "l0": 2.0}],
  "most": [{"token": "\n", "count": 7, "l0": 90.0}, {"token": "-" * 80, "count": 1, "l0": 8.0}],
}


@pytest.fixture
def sweep(tmp_path):
  """L1 coefficients out of order; the largest one failed after two of three steps; one was evaluated."""
  folder = tmp_path / "sweep"
  write_run(
    folder / "a", entries_of(loss=4.2, speeds=[1, 2, 3], l0=10.0, dead=0.3), coefficient=2e-5, sparsity=SPARSITY
  )
  write_run(folder / "b", entries_of(loss=4.0, speeds=[1, 2, 3], l0=100.0), coefficient=0.0)
  failed = entries_of(loss=5.0, speeds=[1, 2], l0=1.0)
  failed[-1] = {name: value for name, value in failed[-1].items() if not name.startswith("validation")}
  failed[-1]["cross_entropy"] = "NaN"
  write_run(folder / "c", failed, coefficient=1e-4, steps=30)
  return report.read_runs(folder)


def test_figures_of_a_sweep_and_a_line_for_each_run_that_lacks_one(sweep, tmp_path):
  pytest.importorskip("matplotlib")
  paths, left_out = figures.paper(sweep, tmp_path)
  names = ["fig2", "fig3", "fig8", "fig9", "fig6_a", "fig7_a"]
  assert [path.name for path in paths] == [f"{name}.png" for name in names]
  for path in paths:
    assert png_size(path)[1] > 10_000, path
  assert left_out == [
    "fig3: run c has no validation at its end (step 20 of 30)",
    "fig6, fig7: run b has no evaluation/activity.json (experiments.eval_lm --activity)",
    "fig6, fig7: run c has no evaluation/activity.json (experiments.eval_lm --activity)",
  ]


def test_curves_are_named_and_ordered_by_coefficient_and_as_long_as_their_runs(sweep, tmp_path, drawn):
  figures.paper(sweep, tmp_path)
  late, l0, dead = drawn[0].axes[1], drawn[2].axes[0], drawn[3].axes[0]
  for axes in (late, l0, dead):
    assert legend(axes) == ["0", "2e-5", "1e-4"]
    assert axes.get_legend().get_title().get_text() == "L1 coefficient"
    assert axes.get_xlabel() == "step"
  assert [len(line.get_xdata()) for line in l0.lines] == [3, 3, 2]
  assert points(dead.lines[1]) == ([10, 20, 30], [30.0, 30.0, 30.0])  # percent
  assert dead.get_ylabel() == "dead neurons (%)"
  assert [list(line.get_xdata()) for line in late.lines[::2]] == [[20, 30], [20, 30], [20]]  # the second half of 30


def test_coefficient_0_has_a_place_on_the_log_axis_of_the_sweep(sweep, tmp_path, drawn):
  figures.paper(sweep, tmp_path)
  losses, neurons = drawn[1].axes
  assert points(losses.lines[0]) == ([0.0, 2e-5], [4.0, 4.2])
  assert points(neurons.lines[0]) == ([0.0, 2e-5], [100.0, 10.0])
  assert [text.get_text() for text in losses.get_xticklabels()] == ["0", "2e-5"]


def test_coefficients_are_spread_over_the_axis_however_unlike_they_are(tmp_path, drawn):
  for name, coefficient in {"a": 0.0, "b": 1e-6, "c": 1e-5, "d": 1e-4}.items():
    write_run(tmp_path / "runs" / name, entries_of(loss=4.0, speeds=[1], l0=5.0), coefficient=coefficient)
  figures.paper(report.read_runs(tmp_path / "runs"), tmp_path)
  axes = drawn[1].axes[0]
  places = [axes.transAxes.inverted().transform(axes.transData.transform((x, 4.0)))[0] for x in (0, 1e-6, 1e-5, 1e-4)]
  assert 0 < places[0] < places[-1] < 1
  assert all(right - left > 0.1 for left, right in itertools.pairwise(places))  # a linear axis has three of them in one


def test_a_sweep_of_one_coefficient_0_can_be_drawn(tmp_path):
  pytest.importorskip("matplotlib")
  write_run(tmp_path / "runs" / "only", entries_of(loss=4.0, speeds=[1], l0=0.0))
  paths, _ = figures.paper(report.read_runs(tmp_path / "runs"), tmp_path)
  assert [path.name for path in paths] == ["fig2.png", "fig3.png", "fig8.png", "fig9.png"]


def test_runs_that_share_a_coefficient_keep_their_names(tmp_path, drawn):
  for name in ("standard", "reinit"):
    write_run(tmp_path / "runs" / name, entries_of(loss=4.0, speeds=[1], l0=5.0), coefficient=2e-5)
  paths, left_out = figures.paper(report.read_runs(tmp_path / "runs"), tmp_path)
  assert legend(drawn[0].axes[1]) == ["reinit", "standard"]
  assert left_out[0] == "fig3: the L1 coefficient does not tell the runs apart"
  assert "fig3.png" not in [path.name for path in paths]


def test_runs_without_neurons_have_losses_and_a_line_that_says_why_no_more(tmp_path):
  pytest.importorskip("matplotlib")
  write_run(tmp_path / "runs" / "none", entries_of(loss=4.0, speeds=[1]))
  paths, left_out = figures.paper(report.read_runs(tmp_path / "runs"), tmp_path)
  assert [path.name for path in paths] == ["fig2.png", "fig3.png"]
  assert left_out[0] == "fig8, fig9: run none has no neurons that can be zero"


def test_layers_tokens_and_positions_are_those_of_the_evaluation(sweep, tmp_path, drawn):
  figures.paper(sweep, tmp_path)
  layers = drawn[4].axes[0]
  assert {text: points(line) for text, line in zip(legend(layers), layers.lines)} == {
    "token with the most": ([1, 2, 3], [100, 150, 40]),
    "mean over tokens": ([1, 2, 3], [10.0, 20.0, 0.5]),
  }
  fewest, most, position = drawn[5].axes
  assert [bar.get_width() for bar in fewest.patches] == [1.5, 2.0]
  names = [[text.get_text() for text in axes.get_yticklabels()] for axes in (fewest, most)]
  assert names == [["\N{OPEN BOX}doesn", "$x_1$"], ["\\n", "-" * 15 + "\N{HORIZONTAL ELLIPSIS}"]]
  assert points(position.lines[0]) == ([1, 2, 3, 4], [64.0, 32.0, 16.0, 8.0])  # a log axis has no position 0
  assert (position.get_xscale(), position.get_yscale()) == ("log", "log")


def test_a_model_of_one_layer_and_a_layer_of_zeros_can_be_drawn(tmp_path, drawn):
  one = SPARSITY | {"l0_per_layer": [0.0], "l0_max_per_layer": [0], "l0_by_position": [0.0], "fewest": [], "most": []}
  write_run(tmp_path / "runs" / "one", entries_of(loss=4.0, speeds=[1], l0=0.0), sparsity=one)
  figures.paper(report.read_runs(tmp_path / "runs"), tmp_path)
  assert points(drawn[4].axes[0].lines[1]) == ([1], [0.0])
  assert drawn[4].axes[0].get_yscale() == "linear"  # a log scale would hide the zero
