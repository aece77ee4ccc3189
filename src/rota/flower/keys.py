"""A fleet's certificate authority, the server's certificate, and the nodes' keys.

KEYS/ca.crt                what nodes need to know the server by
KEYS/ca.key                secret: it signs certificates; the server does not need it
KEYS/server.crt, .key      the server's certificate, and its secret key
KEYS/secret                secret: who may run apps on the SuperLink
KEYS/nodes/NAME, NAME.pub  a node's secret key, and its public key
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.errors import BadInput
from rota.files import replacing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

DAYS = 825
"""How long certificates hold. They begin two days ago, for clients whose clocks are late."""
HOST = re.compile(r"(\*\.)?([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}")
ADVICE = "give one that `rota keys` made, and remove it if it is damaged"


def write(path: Path, data: bytes, secret: bool = False) -> None:
    """Write a new file; nobody else may read a secret one."""
    if path.exists():
        raise BadInput(f"{path} exists already: keep it, or remove it first")
    with replacing(path) as aside:
        aside.touch(0o600 if secret else 0o644)
        aside.write_bytes(data)


def certify(folder: Path, names: Sequence[str]) -> None:
    """Make a certificate authority, and a certificate for a server with these names or addresses.

    `names` are host names or IP addresses by which nodes reach the server. "localhost" and
    127.0.0.1 are always among them.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    alternatives = [_name(name) for name in dict.fromkeys([*names, "localhost", "127.0.0.1"])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nodes").mkdir(exist_ok=True)
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    authority, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rota CA")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])

    def base(name: x509.Name, public: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=DAYS))
        )

    uses = dict.fromkeys(
        [
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ],
        False,
    )
    public = authority.public_key()
    ca = (
        base(issuer, public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(x509.KeyUsage(**uses, key_cert_sign=True, crl_sign=True), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
        .sign(authority, hashes.SHA256())
    )
    certificate = (
        base(subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(alternatives), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), False)
        .sign(authority, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    write(folder / "ca.key", _pem(authority), secret=True)
    write(folder / "ca.crt", ca.public_bytes(encoding))
    write(folder / "server.key", _pem(key), secret=True)
    write(folder / "server.crt", certificate.public_bytes(encoding))
    write(folder / "secret", secrets.token_bytes(32), secret=True)


def node_key(path: Path) -> EllipticCurvePrivateKey:
    """The node key in a file, which is made if it does not exist, with PATH.pub beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if path.exists():
        return read_secret(path.read_bytes(), str(path))
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, plain = serialization.Encoding, serialization.NoEncryption()
    secret = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write(path, secret, secret=True)
    write(path.with_name(f"{path.name}.pub"), public + b"\n")
    return key


def public_bytes(key: Any) -> bytes:
    """A public key as the SuperLink takes it."""
    from cryptography.hazmat.primitives import serialization

    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    public: bytes = key.public_bytes(encoding, form)
    return public


def known(folder: Path) -> list[bytes]:
    """The public keys of a fleet's nodes, as the SuperLink takes them."""
    from cryptography.hazmat.primitives import serialization

    load = serialization.load_ssh_public_key
    files = sorted(folder.glob("nodes/*.pub"))
    return [public_bytes(_elliptic(load, file.read_bytes(), str(file))) for file in files]


def read_secret(text: bytes, what: str) -> EllipticCurvePrivateKey:
    """The secret key in a file's text; `what` is the file."""
    from cryptography.hazmat.primitives import serialization

    def load(text: bytes) -> Any:
        if b"OPENSSH" in text:
            return serialization.load_ssh_private_key(text, None)
        return serialization.load_pem_private_key(text, None)

    key: EllipticCurvePrivateKey = _elliptic(load, text, what)
    return key


def _elliptic(load: Callable[[bytes], Any], text: bytes, what: str) -> Any:
    """A key of the kind that nodes have."""
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = load(text)
    except Exception as error:  # what is in a file may be anything
        raise BadInput(f"{what} cannot be read: {ADVICE}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        raise BadInput(f"{what} is no key of a node: {ADVICE}")
    return key


def _name(name: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not HOST.fullmatch(name):
            raise BadInput(
                f"'{name}' is no name of a host: give one such as fleet.example.org, or an address"
            ) from None
        return x509.DNSName(name)


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem
