"""Track the sequence through the dims of tensors, and judge what each op does along it."""
