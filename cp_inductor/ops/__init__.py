"""The ops that graphs hold: the attention pair, the plan of a batch, a rank's part of a dim."""
