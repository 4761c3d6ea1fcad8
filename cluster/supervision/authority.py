"""The certificates of one cluster's processes."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.cluster.peers.hosts import PEER_NAME
from tandem.transfer.endpoint import PAGES_NAME, Endpoint
from tandem.workers.ports.tls import SERVER_NAME, Identity

SLACK = datetime.timedelta(days=1)  # hosts' clocks differ
LIFETIME = datetime.timedelta(days=3650)  # the authority ends with its launcher


class Authority:
    """Signs certificates for one run of one cluster. Its key is in the launcher's memory, and nowhere else."""

    def __init__(self, cluster: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tandem {cluster}"[:64])])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    def worker(self) -> Identity:
        """Issues an identity for a server. Nobody can call another worker with it."""
        return self._issue("worker", SERVER_NAME, ExtendedKeyUsageOID.SERVER_AUTH)

    def gateway(self) -> Identity:
        """Issues an identity for callers of workers."""
        return self._issue("gateway", None, ExtendedKeyUsageOID.CLIENT_AUTH)

    def pages(self, host: str) -> Endpoint:
        """Issues an endpoint for PEs on that host, which connect to each other both ways. Call this on an authority
        that signs nothing else: otherwise callers of workers could connect, too."""
        issued = self._issue("pages", PAGES_NAME, ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
        return Endpoint(host, issued.authority, issued.certificate, issued.key)

    def peer(self) -> Identity:
        """Issues an identity for gateway processes, which call each other both ways. As for pages(), use an authority
        that signs nothing else."""
        return self._issue("peer", PEER_NAME, ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(self, name: str, dns_name: str | None, *uses: x509.ObjectIdentifier) -> Identity:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=True)
        if dns_name is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Identity(_pem(self._certificate), _pem(certificate), _pem_of_key(key))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + LIFETIME)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
