"""Gradient norms of single sequences: ``block`` finds the parameters, ``sequence_squares`` measures in one pass."""
