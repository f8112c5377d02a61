"""Pieces add up to the whole text, whole characters only, and stop strings take back what belongs to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from sparse_lm.data.tokenizer import Tokenizer
from sparse_lm.inference.text_stream import TextStream


def stream(tokenizer, text, *, after="", stop=()):
  """(pieces of each token, the rest, whether a stop string came)."""
  text_stream = TextStream(tokenizer, tokenizer.encode(after), stop=stop)
  pieces = []
  for token in tokenizer.encode(text):
    pieces.append(text_stream.push(token))
    if text_stream.stopped:
      break
  return pieces, text_stream.finish(), text_stream.stopped


@pytest.mark.parametrize("text", ["", "the cat", "naïve — 漢字 🙂", "\ufffd", "a\ufffd", "  spaces  \n\n"])
def test_pieces_add_up_to_the_text(tokenizer, text):
  pieces, rest, stopped = stream(tokenizer, text)
  assert "".join(pieces) + rest == text
  assert not stopped


def test_half_a_character_is_held_until_it_is_whole_and_given_as_it_is_at_the_end(tokenizer):
  pieces, rest, _ = stream(tokenizer, "é🙂")
  assert [*pieces, rest] == ["", "é", "", "", "", "🙂", ""]
  text_stream = TextStream(tokenizer)
  assert text_stream.push(tokenizer.encode("🙂")[0]) == ""
  assert text_stream.finish() == "\ufffd"


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_end(tokenizer):
  pieces, rest, stopped = stream(tokenizer, "abcdef", stop=["cde"])
  assert (pieces, rest, stopped) == (["a", "b", "", "", ""], "", True)


def test_what_might_have_been_a_stop_string_is_given_when_it_was_none(tokenizer):
  pieces, rest, stopped = stream(tokenizer, "ab\nQ: x\nQ", stop=["\nQ?", "\nQ!"])
  assert "".join(pieces) == "ab\nQ: x"
  assert (rest, stopped) == ("\nQ", False)


def test_the_first_of_several_stop_strings_counts(tokenizer):
  pieces, rest, stopped = stream(tokenizer, "one two three", stop=["three", "tw", "wo t"])
  assert ("".join(pieces), rest, stopped) == ("one ", "", True)


@given(text=st.text(alphabet="ab", max_size=12), stop=st.text(alphabet="ab", min_size=1, max_size=4))
def test_any_stop_string_cuts_where_a_search_in_the_whole_text_finds_it(tokenizer, text, stop):
  pieces, rest, stopped = stream(tokenizer, text, stop=[stop])
  assert "".join(pieces) + rest == text.split(stop)[0]
  assert stopped == (stop in text)


def test_a_decoder_that_drops_the_first_space_of_a_text_does_not_drop_it_of_a_continuation():
  library = Library(models.WordLevel({"▁the": 0, "▁cat": 1, "</s>": 2}, unk_token="</s>"))
  library.decoder = decoders.Metaspace()
  tokenizer = Tokenizer(library.to_str(), name="metaspace")
  text_stream = TextStream(tokenizer, [0])
  assert text_stream.push(1) == " cat"
  assert text_stream.push(0) == " the"
