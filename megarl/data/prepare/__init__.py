"""``megarl data prepare``: ``command`` has its arguments, ``prepare`` writes the prompt files that ``[data]`` reads."""
