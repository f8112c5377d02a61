"""KuaiRand by hand, what of it is left out, every way in which a folder or a file can be wrong, and a run on it."""

import itertools
import math

import numpy as np
import pytest

from sparse_lm import config_io
from sparse_lm.data.interactions import histories
from sparse_lm.data.kuairand import read
from sparse_lm.data.recsys import open_samples
from sparse_lm.errors import UserError
from sparse_lm.recsys_config import InteractionsConfig, RecsysConfig
from sparse_lm.training.recommender import train

EARLY, LATE = "log_standard_4_08_to_4_21_pure.csv", "log_standard_4_22_to_5_08_pure.csv"
RANDOM, USERS, VIDEOS = "log_random_4_22_to_5_08_pure.csv", "user_features_pure.csv", "video_features_basic_pure.csv"
STATISTICS = "video_features_statistic_pure.csv"

LOG = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
LOG += "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
RANGES = "follow_user_num,follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range"
USER = f"user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,{RANGES},"
USER += "register_days,register_days_range," + ",".join(f"onehot_feat{k}" for k in range(18)) + "\n"
VIDEO = "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
VIDEO += "music_id,music_type,tag\n"


def event(user, video, time_ms, *, click=0, like=0):
  return f"{user},{video},20220411,1900,{time_ms},{click},{like},0,0,0,0,0,1385,209900,0,0,0,0,1\n"


def user(name, *, degree="full_active", streamer="0", fans="0", encrypted="7"):
  return f'{name},{degree},0,{streamer},1,5,"(0,10]",{fans},"[1,10)",0,0,3624,730+,{encrypted}{",1" * 17}\n'


def video(name, *, duration="9233.0", music="6618412736", tag="39"):
  return f"{name},789,NORMAL,2022-04-09,ShortImport,0.0,{duration},720.0,1280.0,{music},4.0,{tag}\n"


FILES = {
  EARLY: LOG + event(3, 20, 1649675512999, click=1) + event(5, 10, 1649675512001, like=1),
  LATE: LOG + event(3, 10, 1650600000000) + event(3, 10, 1649675512000, click=1, like=1),
  USERS: USER + user(5, fans="99") + user(3, degree="UNKNOWN", streamer="-124", fans="-124", encrypted=""),
  VIDEOS: VIDEO + video(10, duration="", music="") + video(20, tag='"12,65"') + video(30, tag=""),
}


@pytest.fixture
def lines():
  """Everything that was reported."""
  return []


def write(folder, files):
  """`files` in `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (folder / name).write_bytes(text.encode())
  return folder


def without(*names):
  return {name: text for name, text in FILES.items() if name not in names}


def bags(feature):
  return [feature.ids_T[a:b].tolist() for a, b in itertools.pairwise(feature.offsets)]


def columns(log):
  return log.user_N.tolist(), log.item_N.tolist(), log.time_N.tolist(), log.label_N.tolist()


# Reading -------------------------------------------------------------------------------------------------------------


def test_two_logs_by_hand_in_the_order_of_milliseconds(tmp_path, lines):
  log = read(write(tmp_path, FILES), "is_click", lines.append)
  assert (log.users.names, log.items.names) == (("5", "3"), ("10", "20", "30"))
  seconds = [1649675512, 1649675512, 1649675512, 1650600000]
  assert columns(log) == ([1, 0, 1, 1], [0, 0, 1, 0], seconds, [1, 0, 1, 0])
  assert len(lines) == 1
  assert f"{EARLY}, {LATE}" in lines[0]


def test_another_signal_is_another_label(tmp_path, lines):
  assert read(write(tmp_path, FILES), "is_like", lines.append).label_N.tolist() == [1, 1, 0, 0]


def test_features_by_hand_and_none_where_nothing_is_known(tmp_path, lines):
  log = read(write(tmp_path, FILES), "is_click", lines.append)
  of_user, of_video = log.users.categorical, log.items.categorical
  assert bags(of_user["user_active_degree"]) == bags(of_user["is_live_streamer"]) == [[0], []]
  assert bags(of_user["onehot_feat0"]) == [[0], []]
  assert bags(of_user["follow_user_num_range"]) == [[0], [0]]  # (0,10] is one value, with a comma in it
  assert (bags(of_video["tag"]), of_video["tag"].table_size) == ([[0], [1, 2], []], 3)
  assert bags(of_video["music_id"]) == [[], [0], [0]]
  assert bags(of_video["author_id"]) == [[0], [0], [0]]
  assert len(of_user) == 8 + 18
  assert set(of_video) == {"author_id", "video_type", "upload_type", "music_id", "music_type", "tag"}
  np.testing.assert_allclose(log.users.numeric["fans_user_num"], [math.log(100)] * 2, rtol=1e-6)
  np.testing.assert_allclose(log.users.numeric["register_days"], [math.log(3625)] * 2, rtol=1e-6)
  np.testing.assert_allclose(log.items.numeric["video_duration"], [math.log(9234)] * 3, rtol=1e-6)
  assert set(log.users.numeric) == {"follow_user_num", "fans_user_num", "friend_user_num", "register_days"}
  assert set(log.items.numeric) == {"video_duration", "server_width", "server_height"}


def test_an_unknown_count_is_the_mean_of_the_others_and_zero_if_all_are_unknown(tmp_path, lines):
  videos = [video(10, duration="0"), video(20, duration=""), video(30, duration="99.0"), video(40, duration="-1")]
  log = read(write(tmp_path, FILES | {VIDEOS: VIDEO + "".join(videos)}), "is_click", lines.append)
  np.testing.assert_allclose(
    log.items.numeric["video_duration"], [0, math.log(100) / 2, math.log(100), math.log(100) / 2], rtol=1e-6
  )
  videos = [video(10, duration=""), video(20, duration="UNKNOWN")]
  log = read(write(tmp_path, FILES | {VIDEOS: VIDEO + "".join(videos)}), "is_click", lines.append)
  assert log.items.numeric["video_duration"].tolist() == [0, 0]


def test_histories_never_reach_the_same_second(tmp_path, lines):
  times = [1000, 1999, 2000, 2001, 3000]
  log = LOG + "".join(event(3, 10, time) for time in times)
  found = read(write(tmp_path, {EARLY: log}), "is_click", lines.append)
  _, past_T = histories(found, longest=9).gather(np.array([3]))
  assert past_T.tolist() == [0, 1]  # not the event one millisecond earlier, which lies in its second
  assert np.diff(histories(found, longest=9).gather(np.arange(5))[0]).tolist() == [0, 0, 2, 2, 4]


def test_milliseconds_before_1970_fall_into_the_second_that_they_are_in(tmp_path, lines):
  log = read(write(tmp_path, {EARLY: LOG + event(3, 10, -1) + event(3, 10, 0)}), "is_click", lines.append)
  assert log.time_N.tolist() == [-1, 0]


def test_the_folder_of_the_data_set_stands_for_its_data(tmp_path, lines):
  write(tmp_path / "KuaiRand-Pure" / "data", FILES)
  whole = read(tmp_path / "KuaiRand-Pure", "is_click", lines.append)
  assert columns(whole) == columns(read(tmp_path / "KuaiRand-Pure" / "data", "is_click", lines.append))
  assert len(whole.users.categorical) == 26


def test_the_parts_of_27k_are_one_log(tmp_path, lines):
  name = "log_standard_4_08_to_4_21_27k_part{}.csv"
  log = read(write(tmp_path, {name.format(1): FILES[EARLY], name.format(2): FILES[LATE]}), "is_click", lines.append)
  assert len(log) == 4


@pytest.mark.parametrize("change", ["crlf", "mark", "blank lines", "no last line end", "columns in another order"])
def test_ways_to_write_the_same_table_do_not_matter(tmp_path, change, lines):
  def changed(text):
    return {
      "crlf": text.replace("\n", "\r\n"),
      "mark": "\ufeff" + text,
      "blank lines": text.replace("\n", "\n\n") + "\n",
      "no last line end": text.removesuffix("\n"),
      "columns in another order": "".join(f"{','.join(line.split(',')[::-1])}\n" for line in text.splitlines()),
    }[change]

  names = [EARLY, LATE] if change == "columns in another order" else list(FILES)
  good = read(write(tmp_path / "good", FILES), "is_click", lines.append)
  other = FILES | {name: changed(FILES[name]) for name in names}
  other = read(write(tmp_path / "other", other), "is_click", lines.append)
  assert (other.users.names, other.items.names, columns(other)) == (good.users.names, good.items.names, columns(good))
  for name, it in good.items.categorical.items():
    assert bags(other.items.categorical[name]) == bags(it)


# What is left out ----------------------------------------------------------------------------------------------------


def test_videos_drawn_at_random_are_left_out_and_that_is_said(tmp_path, lines):
  drawn = LOG + event(3, 30, 1650600000001, click=1)
  log = read(write(tmp_path, FILES | {RANDOM: drawn}), "is_click", lines.append)
  assert columns(log) == columns(read(write(tmp_path / "without", FILES), "is_click", lines.append))
  assert any(RANDOM in line and "left out" in line for line in lines)


def test_statistics_over_the_test_period_are_not_even_opened(tmp_path, lines):
  log = read(write(tmp_path, FILES | {STATISTICS: "no table"}), "is_click", lines.append)
  assert len(log) == 4


@pytest.mark.parametrize(("name", "kind"), [(USERS, "user"), (VIDEOS, "video")])
def test_without_a_file_of_features_ids_are_all_that_is_known(tmp_path, name, kind, lines):
  log = read(write(tmp_path, without(name)), "is_click", lines.append)
  entities, names = (log.users, ("3", "5")) if kind == "user" else (log.items, ("20", "10"))
  assert (entities.names, entities.categorical, entities.numeric) == (names, {}, {})
  assert any(line.endswith(f"{name}: the {kind}_id is all that is known of a {kind}") for line in lines)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    (EARLY, "", "line 1: found the header ''; user_id, video_id, time_ms, is_click must be in it, once"),
    (EARLY, LOG, f"{EARLY}: holds no interactions"),
    (LATE, LOG, f"{LATE}: holds no interactions"),
    (EARLY, LOG.replace("is_click,", ""), r"line 1: found the header 'user_id,.*tab'; is_click must be in it, once"),
    (EARLY, LOG.replace("is_like", "is_click"), "is_click must be in it, once"),
    (EARLY, LOG + event(3, 10, 1) + "3,10,1\n", "line 3: found 3 columns; there must be 19: user_id, video_id, date"),
    (EARLY, LOG + event(4, 10, 1), r"line 2: column 1 \(user_id\): found '4'; .* one of the 2 in the file of users"),
    (LATE, LOG + event(3, 40, 1), r"line 2: column 2 \(video_id\): found '40'; .* one of the 3 in the file of videos"),
    (EARLY, LOG + event(3, 10, "1.5"), r"line 2: column 5 \(time_ms\): found '1.5'; .* whole milliseconds"),
    (EARLY, LOG + event(3, 10, 2**63), r"column 5 \(time_ms\): found '9223372036854775808'; .* fit 64 bits"),
    (EARLY, LOG + event(3, 10, 1, click=2), r"line 2: column 6 \(is_click\): found '2'; it must be 0 or 1"),
    (EARLY, LOG + event(3, 10, 1, click=""), r"line 2: column 6 \(is_click\): found ''; it must be 0 or 1"),
    (EARLY, LOG + event(3, 10, 1, click="nan"), r"line 2: column 6 \(is_click\): found 'nan'"),
    (USERS, "", "line 1: found the header ''; user_id, user_active_degree, .* must be in it, once"),
    (USERS, USER.replace("onehot_feat17", "x"), "; onehot_feat17 must be in it, once"),
    (USERS, USER + user(3) + user(5) + user(3), r"line 4: column 1 \(user_id\): found '3'; it is that of line 2 too"),
    (USERS, USER + user(""), r"line 2: column 1 \(user_id\): found ''; a name is required"),
    (USERS, USER + user(3, fans="many"), r"line 2: column 8 \(fans_user_num\): found 'many'; .* finite number"),
    (USERS, USER, r"column 1 \(user_id\): found '3'; it must be one of the 0 in the file of users"),
    (VIDEOS, VIDEO.replace(",tag", ""), "; tag must be in it, once"),
    (VIDEOS, VIDEO + video(10) + video(10), r"line 3: column 1 \(video_id\): found '10'; it is that of line 2 too"),
    (VIDEOS, VIDEO + video(10, tag="12,65"), "line 2: found 13 columns; there must be 12"),
    (VIDEOS, VIDEO + video(10, duration="inf"), r"line 2: column 7 \(video_duration\): found 'inf'"),
  ],
)
def test_a_wrong_file_is_named_with_line_and_column(tmp_path, name, text, said, lines):
  with pytest.raises(UserError, match=said) as error:
    read(write(tmp_path, FILES | {name: text}), "is_click", lines.append)
  assert str(tmp_path) in str(error.value)
  assert "\n" not in str(error.value)


def refused(path, said):
  with pytest.raises(UserError, match=said) as error:
    read(path, "is_click", lambda line: None)
  assert "give the folder with log_standard_*.csv of one variant" in str(error.value)
  assert "\n" not in str(error.value)


def test_a_path_without_logs_says_what_to_give(tmp_path):
  refused(tmp_path / "nowhere", "there is no such folder; give")
  refused(tmp_path, r"holds no log_standard_\*.csv of KuaiRand; give")
  write(tmp_path, FILES)
  refused(tmp_path / EARLY, "is no folder; give")
  refused(write(tmp_path / "random", {RANDOM: FILES[EARLY]}), "holds no log_standard")


def test_two_variants_in_one_folder_are_refused(tmp_path):
  write(tmp_path, FILES | {"log_standard_4_08_to_4_21_1k.csv": FILES[EARLY]})
  refused(tmp_path, r"holds both log_standard_4_08_to_4_21_1k.csv and log_standard_4_08_to_4_21_pure.csv; give")


def test_logs_in_a_folder_and_in_its_data_are_refused(tmp_path):
  write(write(tmp_path, FILES) / "data", FILES)
  refused(tmp_path, rf"holds both {EARLY} and data/{EARLY}; give")


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"path": None}, r"data\.source='kuairand' needs data\.path: the folder with log_standard_\*\.csv$"),
    ({"path": ""}, r"data\.path='' names nothing; give the folder with log_standard_"),
    ({"label": "is_nice"}, r"data\.label='is_nice' is unknown; allowed: is_click, long_view, is_like"),
    ({"label": ""}, r"data\.label='' is unknown"),
    ({"positive_from": 3.0}, "data.source='kuairand' reads no data.positive_from, but it is 3.0; leave it out"),
    (
      {"source": "movielens", "label": "is_like"},
      r"data\.source='movielens' reads no data\.label, but it is 'is_like'",
    ),
  ],
)
def test_a_config_that_cannot_work_is_refused(changes, said):
  InteractionsConfig(source="kuairand", path="folder", label="long_view").validate()
  with pytest.raises(UserError, match=said):
    InteractionsConfig(**{"source": "kuairand", "path": "folder"} | changes).validate()


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_model_trains_on_it_and_is_judged_on_later_clicks(tmp_path):
  events = [event(n % 3, n % 5, 1000 * n, click=int(n * 7 % 3 == 0), like=int(n % 2)) for n in range(120)]
  files = {EARLY: LOG + "".join(events[:80]), LATE: LOG + "".join(events[80:])}
  files |= {USERS: USER + "".join(user(n) for n in range(3)), VIDEOS: VIDEO + "".join(video(n) for n in range(5))}
  changes = {
    "model.kind": "din",
    "model.width": 4,
    "data.source": "kuairand",
    "data.path": str(write(tmp_path / "kuairand", files)),
    "data.longest": 4,
    "training.steps": 3,
    "training.batch_size": 16,
    "training.warmup_steps": 1,
  }
  config = config_io.overlay(RecsysConfig(), changes)
  last = train(config, tmp_path / "run")
  assert last["step"] == 3
  assert np.isfinite([last["loss"], last["validation_ne"], last["test_ne"]]).all()
  clicked, liked = (
    open_samples(config_io.overlay(config, {"data.label": label}), lambda line: None).train
    for label in (None, "is_like")
  )
  assert [int(part.labels.sum()) for part in (clicked, liked)] == [40, 60]
