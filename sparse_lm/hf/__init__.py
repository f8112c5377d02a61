"""Hugging Face folders: Llama and the paper's sparse variant read, and any of our models with neurons written."""

from sparse_lm.hf.read import HfFolder as HfFolder
from sparse_lm.hf.write import DTYPES as DTYPES
from sparse_lm.hf.write import write_folder as write_folder
