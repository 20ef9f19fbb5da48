"""The engine on SGLang servers.

A response: ``engine`` builds the request, ``client`` sends it to a server, ``answers`` checks and decodes what comes
back. An update: ``engine`` hands the tensors to ``fleet``, which sends them to all servers through ``weights/``.

    server, spec, reaper    one server process: how it is started and ended
    fleet, member           all servers of an engine: updated together, restarted when they die
    versions, check         what each SGLang release can do; what a configuration's servers are
    plugin/, cpu/           run inside a server; megarl never imports cpu
"""
