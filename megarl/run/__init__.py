"""A run as others see it: its folder, lock, vital signs, status, requests to stop, metrics log and audit."""
