"""What happens around a run: launching, planning, checking, evaluating, reporting, patching, starting."""
