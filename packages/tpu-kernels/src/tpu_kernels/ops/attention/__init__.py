"""Attention: ``torch.nn.functional.scaled_dot_product_attention``, forward and backward."""
