"""Using a trained model: opening it, scoring text with it, generating text from it."""

from sparse_lm.inference.opening import OpenedModel as OpenedModel
from sparse_lm.inference.opening import open_model as open_model
