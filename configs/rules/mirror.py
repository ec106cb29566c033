"""Rules for the mirror of the weights."""

import re

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_mirror(config: Config) -> None:
    """Raise ``ConfigError`` unless the mirror is a URL of a store, and is there if workers read from it."""
    mirror, source = config.parameters.mirror, config.rollout.weights_from
    if mirror:
        check_store_url("parameters.mirror", mirror)
    elif source == "mirror":
        raise ConfigError("rollout.weights_from", source, 'it needs parameters.mirror; leave it at "server"')


def check_store_url(key: str, url: str) -> None:
    """Raise ``ConfigError`` unless ``url`` is ``s3://bucket/prefix`` or ``file:///folder``, without credentials."""
    scheme, mark, rest = url.partition("://")
    name, _, path = rest.partition("/")
    # Secret keys of AWS contain slashes, so credentials may end within the path.
    if "@" in name or ":" in name or "?" in rest or "#" in rest:
        _, at, shown_rest = rest.rpartition("@")
        shown_url = f"{scheme}{mark}...{at + re.split('[?#]', shown_rest)[0] if at else ''}"
        raise ConfigError(key, shown_url, "credentials and options belong into the environment, not into the URL")
    is_folder = scheme == "file" and not name and bool(path.strip("/"))
    is_bucket = scheme == "s3" and bool(_BUCKET.fullmatch(name)) and "//" not in f"/{path.rstrip('/')}"
    if not mark or not (is_folder or is_bucket):
        raise ConfigError(key, url, "it must be s3://BUCKET/PREFIX or file:///FOLDER")
