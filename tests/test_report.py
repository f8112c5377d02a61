"""Tables and plots from run folders that are written by hand."""

import json
import struct
import sys

import pytest

from sparse_lm import report
from sparse_lm.errors import UserError


def write_run(folder, entries, ffn_width=200):
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps({"model": {"ffn_width": ffn_width}}))
  (folder / "env.json").write_text(json.dumps({"device": {"kind": "cpu"}}))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
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
  return {name: report.read_run(write_run(tmp_path / name, entries)) for name, entries in folders.items()}


def cells(table):
  return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]


def test_table_has_a_row_a_run_with_losses_against_the_baseline_and_the_median_speed(runs):
  header, _, dense, sparse, none = cells(report.markdown_table(runs, baseline="dense"))
  assert header[3] == "against dense"
  assert dense == ["dense", "0", "4.0000", "+0.0%", "100.0 of 200", "50.0%", "0.0%", "2,000"]
  assert sparse == ["sparse", "0.00123", "4.1000", "+2.5%", "12.5 of 200", "93.8%", "25.0%", "1,500"]
  assert none == ["no FFN", "0", "5.0000", "+25.0%", "-", "-", "-", "12,346"]


def test_every_row_has_as_many_cells_as_the_header(runs):
  assert len({len(row) for row in cells(report.markdown_table(runs, baseline="dense"))}) == 1


def test_another_baseline_turns_the_comparison_around(runs):
  _, _, dense, sparse, _ = cells(report.markdown_table(runs, baseline="sparse"))
  assert (dense[3], sparse[3]) == ("-2.4%", "+0.0%")


def test_a_run_that_was_cut_in_its_last_line_counts_as_unfinished(tmp_path):
  folder = write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1, 2], l0=3.0))
  metrics = folder / "metrics.jsonl"
  metrics.write_text(metrics.read_text()[:-5])
  with pytest.raises(UserError, match="run holds no finished run"):
    report.read_run(folder)


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_folder_that_holds_no_run_is_named(tmp_path, kind):
  if kind == "empty":
    (tmp_path / "nothing").mkdir()
  with pytest.raises(UserError, match="nothing holds no finished run"):
    report.read_run(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["config.json", "env.json"])
def test_a_run_without_its_config_or_environment_is_refused_by_the_name_of_the_file(tmp_path, name):
  folder = write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1]))
  (folder / name).unlink()
  with pytest.raises(UserError, match=name):
    report.read_run(folder)


def png_size(path):
  """Width and height from the header chunk, after a check of the signature."""
  content = path.read_bytes()
  assert content[:8] == b"\x89PNG\r\n\x1a\n"
  assert content[12:16] == b"IHDR"
  assert content.rstrip().endswith(b"IEND\xaeB`\x82")
  return struct.unpack(">II", content[16:24]), len(content)


def test_plots_are_png_files_with_something_in_them(runs, tmp_path):
  pytest.importorskip("matplotlib")
  paths = report.plot(runs, tmp_path)
  assert [path.name for path in paths] == ["loss.png", "l0.png", "l0_per_layer.png"]
  for path in paths:
    (width, height), size = png_size(path)
    assert width > 600, path
    assert height > 400, path
    assert size > 10_000, path


def test_plots_show_losses_of_every_run_and_neurons_of_those_that_have_some(runs, tmp_path, monkeypatch):
  pyplot = pytest.importorskip("matplotlib.pyplot")
  drawn = []
  monkeypatch.setattr(pyplot, "close", drawn.append)
  report.plot(runs, tmp_path)
  labels = [[text.get_text() for text in figure.axes[0].get_legend().get_texts()] for figure in drawn]
  assert labels == [["dense", "sparse", "no FFN"], ["dense", "sparse"], ["dense", "sparse"]]
  training, validation = drawn[0].axes[0].lines[:2]
  assert (list(training.get_xdata()), list(training.get_ydata())) == ([10, 20, 30], [5.0, 4.5, 4.0 + 1 / 3])
  assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([30], [4.0])
  assert list(drawn[2].axes[0].lines[1].get_ydata()) == [6.25, 18.75]
  monkeypatch.undo()
  for figure in drawn:
    pyplot.close(figure)


def test_a_loss_that_was_nan_is_drawn_as_a_gap(tmp_path):
  """metrics.jsonl holds NaN as a string."""
  pytest.importorskip("matplotlib")
  entries = entries_of(loss=4.0, speeds=[1, 2, 3], l0=5.0)
  entries[1]["cross_entropy"] = "nan"
  run = report.read_run(write_run(tmp_path / "run", entries))
  assert len(report.plot({"run": run}, tmp_path)) == 3


def test_runs_without_any_neurons_can_be_plotted(tmp_path):
  pytest.importorskip("matplotlib")
  run = report.read_run(write_run(tmp_path / "run", entries_of(loss=4.0, speeds=[1, 2])))
  paths = report.plot({"run": run}, tmp_path)
  assert [path.name for path in paths] == ["loss.png"]  # an empty plot of neurons says nothing
  for path in paths:
    png_size(path)


def test_plots_without_matplotlib_say_what_to_install(runs, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(UserError, match="plots need the package matplotlib"):
    report.plot(runs, tmp_path)
