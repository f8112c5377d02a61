"""How good a model is: perplexity of text, cloze tasks, and how sparse its hidden units are on text."""
