"""A plugin for SGLang servers: routing traces in a sixth of the bytes, for clients that ask for it.

SGLang finds it in one of two ways. Servers that megarl starts have this directory on their PYTHONPATH, where the
``dist-info`` directory announces ``megarl_routes_plugin`` as an installed package would. In an environment that megarl
itself is installed in, megarl's own entry point announces it, under the same name, so that it acts once. A server whose
``SGLANG_PLUGINS`` lists other plugins goes without.

    compact               what is asked for, and the coding: for both sides
    megarl_routes_plugin  the server's side
"""
