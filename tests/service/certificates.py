"""A certificate for 127.0.0.1, made by openssl."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)),
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    return cert, key
