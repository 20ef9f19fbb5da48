"""A plugin for SGLang servers: routing traces in a sixth of the bytes, and weight updates as deltas.

SGLang finds the plugin in two ways. megarl puts the directory on the PYTHONPATH of its servers, where the ``dist-info``
directory announces ``megarl_routes_plugin`` like an installed package. An environment with megarl has megarl's entry
point under an equal name: the plugin acts once. Without an entry in ``SGLANG_PLUGINS``, if set, a server runs without
the plugin.

compact               request header and coding: for both sides
deltas                buckets of a weight update, of which the server has a base: for both sides
megarl_routes_plugin  the server's side
"""
