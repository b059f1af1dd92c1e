"""Certificates made by `openssl` for one run: an authority, and what it did or did not sign."""

import datetime
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Certificates", "certificates", "needs_openssl"]

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

_YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


def _openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Certificates:
    """Paths of files; certificates and keys lie in one file each."""

    directory: Path

    @property
    def ca(self):
        return str(self.directory / "ca.pem")

    def path(self, name):
        """`server`, `client`, `wrong-host`, `expired`, `self-signed` or `other-client`."""
        return str(self.directory / f"{name}.pem")

    def _key(self, name):
        key = self.directory / f"{name}.key"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        return key

    def authority(self, name, subject):
        key = self._key(name)
        out = self.directory / f"{name}.crt"
        _openssl(
            *("req", "-x509", "-new", "-key", key, "-subj", f"/CN={subject}", "-days", "2"),
            *("-addext", "keyUsage=critical,keyCertSign,digitalSignature", "-out", out),
        )
        (self.directory / f"{name}.pem").write_bytes(out.read_bytes() + key.read_bytes())

    def sign(self, name, alternative, *, by="ca", expired=False):
        key = self._key(name)
        request, out = self.directory / f"{name}.csr", self.directory / f"{name}.crt"
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\n")
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        if expired:
            # `x509 -days` takes no past on every version of openssl; `ca` takes dates.
            database = self.directory / "index.txt"
            database.touch()
            config = self.directory / "ca.cnf"
            config.write_text(
                "[ca]\ndefault_ca=d\n[d]\n"
                f"database={database}\nnew_certs_dir={self.directory}\nrand_serial=yes\n"
                "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
            )
            start = _YESTERDAY - datetime.timedelta(days=1)
            _openssl(
                *("ca", "-batch", "-config", config, "-in", request, "-out", out, "-notext"),
                *("-cert", self.directory / f"{by}.crt", "-keyfile", self.directory / f"{by}.key"),
                *(
                    "-startdate",
                    f"{start:%Y%m%d%H%M%SZ}",
                    "-enddate",
                    f"{_YESTERDAY:%Y%m%d%H%M%SZ}",
                ),
                *("-extfile", extensions),
            )
        else:
            _openssl(
                *("x509", "-req", "-in", request, "-days", "2", "-extfile", extensions),
                *("-CA", self.directory / f"{by}.crt", "-CAkey", self.directory / f"{by}.key"),
                *("-CAcreateserial", "-out", out),
            )
        (self.directory / f"{name}.pem").write_bytes(out.read_bytes() + key.read_bytes())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority and certificates of every kind."""
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    made.authority("ca", "weighlock test")
    made.authority("other-ca", "somebody else")
    made.sign("server", "IP:127.0.0.1,DNS:localhost")
    made.sign("wrong-host", "DNS:elsewhere.example")
    made.sign("expired", "IP:127.0.0.1", expired=True)
    made.sign("client", "DNS:client.example")
    made.sign("other-client", "DNS:client.example", by="other-ca")
    made.authority("self-signed", "127.0.0.1")
    return made
