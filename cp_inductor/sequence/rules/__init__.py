"""What each aten op makes of types: `infer`, by the rules of a file per family of ops."""
