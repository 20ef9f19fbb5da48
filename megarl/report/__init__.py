"""Reports: HTML pages of a run, and of two routing traces."""
