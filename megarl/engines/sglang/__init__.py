"""The engine on SGLang servers.

Responses: ``engine`` builds the request, ``client`` sends the request to a server, ``answers`` checks and decodes the
answer. Updates: ``engine`` hands the tensors to ``fleet``, which sends them to all servers by a transport.

server, spec, reaper            one server process: start and end; a look at the servers of a configuration
fleet                           all servers of an engine, updated together
member                          one server of a fleet, restarted when it dies
transports/                     four ways of weights to the servers
versions                        releases, and wrong arguments
plugin/, cpu/                   run inside a server; megarl never imports cpu
"""
