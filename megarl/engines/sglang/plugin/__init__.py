"""A plugin for SGLang servers: routing traces in a sixth of the bytes, at a client's request.

SGLang finds the plugin in two ways. Servers started by megarl have this directory on their PYTHONPATH, where the
``dist-info`` directory announces ``megarl_routes_plugin`` like an installed package. In an environment with megarl,
megarl's own entry point announces the plugin, under an equal name, so that the plugin acts once. A server whose
``SGLANG_PLUGINS`` lists only other plugins runs without.

compact               request header and coding: for both sides
megarl_routes_plugin  the server's side
"""
