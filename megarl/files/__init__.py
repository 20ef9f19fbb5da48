"""Files on a disk, written completely or not at all; files and JSON of strangers, read with limits.

writing          write atomically, flush, hash; the files of a Hugging Face folder besides the weights
outputs          what megarl wrote, and may therefore replace or remove
foreign_json     open regular files only; parse JSON with limits; read the body of an HTTP answer
pickles          the pickles in checkpoints, read without running code
bounded_process  run functions in a forked process with limits
shipped          folders that a wheel carries
texts            tables of TOML beside modules, and the texts of refusals
"""
