"""Host names, IP addresses and URLs."""

from urllib.parse import urlsplit


def url_host(host: str) -> str:
    """Return a host for a URL: an IPv6 address gets brackets, ``[2001:db8::7]``, unless present."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def has_host(url: str) -> bool:
    """Whether a URL has a host and, if any, a numeric port; an IPv6 address needs brackets."""
    try:
        url_parts = urlsplit(url)
        _ = url_parts.port  # ValueError where it is no number
        return bool(url_parts.hostname)
    except ValueError:
        return False
