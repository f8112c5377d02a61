"""The content hash and the validation split."""

import collections

import numpy as np
import pytest

from sparse_lm.config import DataConfig
from sparse_lm.data.corpus import read_corpus
from sparse_lm.errors import UserError


def corpus_of(folder, texts, *, fraction, names=None):
  folder.mkdir()
  names = names or [f"{n:04d}.txt" for n in range(len(texts))]
  for name, text in zip(names, texts, strict=True):
    (folder / name).write_bytes(text.encode())
  config = DataConfig(source="text", path=str(folder), validation_fraction=fraction)
  return read_corpus(config, lambda line: None)


def held_out(corpus):
  return list(corpus.texts("validation"))


TEXTS = [f"text {n}" for n in range(100)]


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (0.05, 5), (0.051, 6), (0.07, 7), (0.29, 29), (0.99, 99)])
def test_the_ceiling_of_the_decimal_fraction_is_held_out(tmp_path, fraction, count):
  corpus = corpus_of(tmp_path / "c", TEXTS, fraction=fraction)
  assert (corpus.num_documents("training"), corpus.num_documents("validation")) == (100 - count, count)
  validation = held_out(corpus)
  assert len(validation) == count
  assert list(corpus.texts("training")) == [text for text in TEXTS if text not in validation]


def test_fraction_zero_holds_out_nothing(tmp_path):
  corpus = corpus_of(tmp_path / "c", TEXTS, fraction=0.0)
  assert list(corpus.texts("training")) == TEXTS
  assert held_out(corpus) == []


def test_the_split_does_not_depend_on_names_or_order(tmp_path):
  one = corpus_of(tmp_path / "one", TEXTS, fraction=0.1)
  two = corpus_of(tmp_path / "two", TEXTS, fraction=0.1, names=[f"{(n * 37) % 100:04d}.txt" for n in range(100)])
  assert sorted(held_out(one)) == sorted(held_out(two))
  assert one.content_hash != two.content_hash  # the stream of tokens does depend on the order


def test_the_same_texts_have_the_same_hash_in_another_place_and_one_character_changes_it(tmp_path):
  one = corpus_of(tmp_path / "one", TEXTS, fraction=0.1)
  assert one.content_hash == corpus_of(tmp_path / "two", TEXTS, fraction=0.2).content_hash
  assert one.content_hash != corpus_of(tmp_path / "three", [*TEXTS[:-1], "text 98"], fraction=0.1).content_hash
  # The same characters cut into other documents are another corpus.
  cut = [TEXTS[0] + TEXTS[1][:1], TEXTS[1][1:], *TEXTS[2:]]
  assert one.content_hash != corpus_of(tmp_path / "four", cut, fraction=0.1).content_hash


def test_copies_of_a_document_are_all_on_one_side(tmp_path):
  corpus = corpus_of(tmp_path / "c", TEXTS * 3, fraction=0.25)
  sides = collections.Counter(held_out(corpus))
  assert len(sides) == 25
  assert set(sides.values()) == {3}
  assert not sides.keys() & set(corpus.texts("training"))


def test_adding_a_document_moves_at_most_one_other(tmp_path):
  before = held_out(corpus_of(tmp_path / "one", TEXTS, fraction=0.1))
  after = held_out(corpus_of(tmp_path / "two", [*TEXTS, "one more"], fraction=0.1))
  assert len(set(before) - set(after)) <= 1


@pytest.mark.parametrize(
  ("texts", "fraction", "numbers"), [(["a"], 0.05, "1 of 1"), (["a"] * 9, 0.5, "1 of 1"), (["a", "b"], 0.9, "2 of 2")]
)
def test_a_split_that_leaves_nothing_to_train_on_says_what_to_do(tmp_path, texts, fraction, numbers):
  with pytest.raises(
    UserError, match=rf"validation_fraction={fraction} holds out {numbers} different documents .*lower it"
  ):
    corpus_of(tmp_path / "c", texts, fraction=fraction)


@pytest.mark.parametrize("texts", [[""], ["", "", ""]])
def test_a_corpus_without_text_is_refused(tmp_path, texts):
  with pytest.raises(UserError, match=rf"the corpus is empty \({len(texts)} documents, 0 bytes of text\)"):
    corpus_of(tmp_path / "c", texts, fraction=0.05)


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_files_that_change_between_two_passes_are_noticed(tmp_path, change):
  corpus = corpus_of(tmp_path / "c", TEXTS, fraction=0.1)
  if change == "removed":
    (tmp_path / "c/0099.txt").unlink()
  else:
    (tmp_path / "c" / {"edited": "0007.txt", "added": "1000.txt"}[change]).write_text("changed")
  with pytest.raises(UserError, match="the corpus changed while it was being read"):
    list(corpus.texts("training"))


def test_many_empty_documents_count_as_one_text(tmp_path):
  corpus = corpus_of(tmp_path / "c", [*TEXTS, *[""] * 300], fraction=0.5)
  assert np.count_nonzero(corpus.held_out_N) in (51, 50 + 300)  # 51 of 101 different texts, one of which has 300 copies
