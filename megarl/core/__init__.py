"""The ground floor: what the algorithms compute, in plain torch and numpy.

No module reads a file (except its own tables), talks to another process, or knows Megatron or a config object, so
every formula can be called and tested with a handful of numbers. Core imports only ``megarl.errors`` of megarl.

``choices`` holds records that a configuration makes, ``objectives`` the one equation, ``sampling`` the sampling laws.
The docstring of each module says the rest.
"""
