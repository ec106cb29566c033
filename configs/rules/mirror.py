"""Rules for the mirror of the weights."""

from urllib.parse import urlsplit

from staleflow.configs.errors import ConfigError
from staleflow.configs.schema import Config


def check_mirror(config: Config) -> None:
    """Raise ``ConfigError`` unless the mirror is a URL of a store, and is there if workers read from it."""
    mirror, source = config.parameters.mirror, config.rollout.weights_from
    if mirror:
        check_store_url("parameters.mirror", mirror)
    elif source == "mirror":
        raise ConfigError("rollout.weights_from", source, 'it needs parameters.mirror; leave it at "server"')


def check_store_url(key: str, url: str) -> None:
    """Raise ``ConfigError`` unless ``url`` is ``s3://bucket/prefix`` or ``file:///folder``, without credentials."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown_url = f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(key, shown_url, "credentials and options belong into the environment, not into the URL")
    if not (parts.scheme == "s3" and parts.netloc) and not url.startswith("file:///"):
        raise ConfigError(key, url, "it must be s3://BUCKET/PREFIX or file:///FOLDER")
