"""The loss of a language model: cross-entropy of a linear layer's logits, which are not built."""
