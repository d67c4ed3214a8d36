"""Secrets and certificates in files: read, checked, and never shown.

Messages name the setting and the file, not what is in it. Needs the standard
library alone: the client uses it as the server does.
"""

from __future__ import annotations

import logging
import re
import ssl
import stat
from pathlib import Path

from orca_dist.errors import ConfigError

KEY = re.compile(r"[!-~]{1,512}")  # what a header can carry: visible ASCII
KEY_RULE = "1 to 512 visible ASCII characters, without spaces"

log = logging.getLogger(__name__)


def is_key(text: str) -> bool:
    """Whether `text` can be an API key."""
    return KEY.fullmatch(text) is not None


def read_bytes(setting: str, path: Path) -> bytes:
    """The file that `setting` names; raises ConfigError where it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} = {path}: can't be read: {error.strerror}") from None


def read_secret(setting: str, path: Path) -> bytes:
    """As read_bytes, and warns where everybody on the machine can read the file."""
    data = read_bytes(setting, path)
    mode = path.stat().st_mode
    if mode & stat.S_IROTH:
        log.warning(
            "%s = %s: every user of this machine can read it (mode %03o): chmod 600 it",
            setting,
            path,
            stat.S_IMODE(mode),
        )
    return data


def read_api_key(setting: str, path: Path) -> str:
    """The one key in a client's file."""
    text = read_secret(setting, path).decode(errors="replace").strip()
    if not is_key(text):
        raise ConfigError(f"{setting} = {path}: needs one key: {KEY_RULE}")
    return text


def read_pair(cert_setting: str, cert: Path, key_setting: str, key: Path) -> tuple[bytes, bytes]:
    """The certificate chain and its private key; raises ConfigError unless they fit."""
    pair = read_bytes(cert_setting, cert), read_secret(key_setting, key)

    def no_password() -> str:
        raise ConfigError(f"{key_setting} = {key}: is encrypted; give it unencrypted, mode 600")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{key_setting} = {key}: is not the key of {cert_setting} = {cert}"
            ) from None
        raise ConfigError(
            f"{cert_setting} = {cert} and {key_setting} = {key}: need a PEM certificate and its "
            f"PEM key ({error.reason or 'no PEM data'})"
        ) from None
    return pair


def read_authorities(setting: str, path: Path) -> bytes:
    """The CA certificates in a PEM file."""
    data = read_bytes(setting, path)
    try:
        ssl.create_default_context(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else "no PEM data"
        raise ConfigError(f"{setting} = {path}: needs PEM certificates ({reason})") from None
    return data
