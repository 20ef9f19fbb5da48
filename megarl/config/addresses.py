"""Host names, IP addresses and the URLs that hold them."""

from urllib.parse import urlsplit


def url_host(host: str) -> str:
    """Return a host as a URL holds it: an IPv6 address in brackets, ``[2001:db8::7]``; it may have them already."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def has_host(url: str) -> bool:
    """Whether a URL names a host, and a port that is a number if it names one; an IPv6 address needs brackets."""
    try:
        url_parts = urlsplit(url)
        _ = url_parts.port  # ValueError where it is no number
        return bool(url_parts.hostname)
    except ValueError:
        return False
