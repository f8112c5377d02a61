"""Text as endless batches of token blocks: reading, splitting, tokenising, packing, shuffling, resuming."""

from sparse_lm.data.batches import BatchIterator as BatchIterator
from sparse_lm.data.batches import training_batches as training_batches
from sparse_lm.data.batches import validation_batches as validation_batches
from sparse_lm.data.dataset import Dataset as Dataset
from sparse_lm.data.packing import Batch as Batch
from sparse_lm.data.packing import Blocks as Blocks
from sparse_lm.data.packing import padding as padding
from sparse_lm.data.pipeline import open_dataset as open_dataset
from sparse_lm.data.text import documents as documents
from sparse_lm.data.text import texts as texts
from sparse_lm.data.tokenizer import Tokenizer as Tokenizer
