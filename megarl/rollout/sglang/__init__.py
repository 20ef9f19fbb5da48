"""The engine on SGLang servers: clients, servers, weights, routes. ``plugin`` and ``cpu`` run inside a server."""
