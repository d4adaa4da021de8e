"""Where we may go: the corpus of addresses that lead inside, and the operator's list."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.fetch.http.addresses import ParsedRules, Rules, is_public

INSIDE = [
    "http://127.0.0.1/",
    "http://127.8.8.8:8080/x",
    "http://0.0.0.0/",
    "http://10.1.2.3/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://169.254.169.254/latest/meta-data",
    "http://100.64.0.1/",
    "http://192.0.0.8/",
    "http://192.0.2.1/",
    "http://198.18.0.1/",
    "http://198.51.100.1/",
    "http://203.0.113.1/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::127.0.0.1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[::ffff:8.8.8.8]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::10.0.0.1]/",
    "http://[64:ff9b:1::1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    "http://[2001:db8::1]/",
    "http://[fe80::1]/",
    "http://[fc00::1]/",
    "http://[fec0::1]/",
    "http://[ff02::1]/",
    "http://[100::1]/",
]
IN_DISGUISE = [
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://017700000001/",
    "http://127.0.0.1./",
    "http://127.0.0.01/",
    "http://1.2.3.4.5/",
    "http://999.1.1.1/",
    "http://a.0x7f/",
    "http://localhost./",
    "http://example.com./",
    "http://[fe80::1%25eth0]/",
    "http://[fe80::1%eth0]/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://127\u30020.0.1/",
    "http://ex\u00e4mple.com/",
]
SMUGGLED = [
    "http://user@example.com/",
    "http://user:password@example.com/",
    "http://example.com@127.0.0.1/",
    "http://example.com\\@127.0.0.1/",
    "http://example.com/\r\nX: y",
    "http://example.com/\nX",
    "http://exa\tmple.com/",
    "http://example.com/ x",
    "http://example.com\0.evil.com/",
    "http://exa%6dple.com/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "gopher://example.com/",
    "oci://example.com/",
    "javascript:alert(1)",
    "data:text/plain,x",
]
NO_URL = [
    "",
    "example.com",
    "http://",
    "http:///x",
    "http://example.com:port/",
    "http://example.com:99999/",
    "http://[::1",
]
NO_URL += ["http://example.com:0/", "//example.com/", "https://example.com/" + "x" * 9000]


@pytest.mark.parametrize("url", INSIDE + IN_DISGUISE + SMUGGLED)
def test_whatever_leads_inside_is_refused(url: str) -> None:
    """F-107."""
    with pytest.raises(Invalid) as caught:
        ParsedRules(Rules()).check_url(url)
    assert caught.value.code == "uri_not_allowed"
    assert "password" not in caught.value.message


@pytest.mark.parametrize("url", NO_URL)
def test_what_is_no_url_is_told_so(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        ParsedRules(Rules()).check_url(url)
    assert caught.value.code == "invalid_uri"


@pytest.mark.parametrize(
    ("url", "host", "port", "spelt"),
    [
        ("https://example.com/x?y=1", "example.com", 443, "https://example.com/x?y=1"),
        ("HTTP://EXAMPLE.com:8080", "example.com", 8080, "http://example.com:8080"),
        ("https://8.8.8.8//x", "8.8.8.8", 443, "https://8.8.8.8//x"),
        ("https://[2606:4700:0::1111]:444/", "2606:4700::1111", 444, "https://[2606:4700::1111]:444/"),
        ("https://[64:FF9B::808:808]/", "64:ff9b::808:808", 443, "https://[64:ff9b::808:808]/"),
        ("https://xn--exmple-cua.com?q", "xn--exmple-cua.com", 443, "https://xn--exmple-cua.com?q"),
        ("https://a_b.example.com/a%2Fb", "a_b.example.com", 443, "https://a_b.example.com/a%2Fb"),
    ],
)
def test_a_public_url_is_taken_apart_and_spelt_one_way(url: str, host: str, port: int, spelt: str) -> None:
    target = ParsedRules(Rules()).check_url(url)
    assert (target.host, target.port, target.url) == (host, port, spelt)


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("127.0.0.1", "http://127.0.0.1:5000/", True),
        ("127.0.0.1:5000", "http://127.0.0.1:5000/", True),
        ("127.0.0.1:5000", "http://127.0.0.1:5001/", False),
        ("127.0.0.1", "http://127.0.0.2/", False),
        ("127.0.0.0/8", "http://127.9.9.9/", True),
        ("10.0.0.0/8", "http://127.0.0.1/", False),
        ("10.0.0.5/8", "http://10.9.0.1/", True),
        ("::1", "http://[::1]/", True),
        ("[::1]:80", "http://[::1]/", True),
        ("[::1]:81", "http://[::1]/", False),
        ("fc00::/7", "http://[fd00::1]/", True),
        ("127.0.0.0/8", "http://[::ffff:127.0.0.1]/", False),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000/", True),
        ("http://127.0.0.1:5000/", "http://127.0.0.1:5001/", False),
    ],
)
def test_the_operators_list_opens_exactly_what_it_names(allowed: str, url: str, is_allowed: bool) -> None:
    rules = ParsedRules(Rules(allowed=(allowed,)))
    if is_allowed:
        rules.check_url(url)
        return
    with pytest.raises(Invalid) as caught:
        rules.check_url(url)
    assert caught.value.code == "uri_not_allowed"


def test_a_listed_name_may_resolve_to_anything_and_others_only_to_public_addresses() -> None:
    rules = ParsedRules(Rules(allowed=("registry.lan", "10.0.0.0/8")))
    rules.check_address("registry.lan", 5000, ip_address("192.168.0.9"))
    rules.check_address("other.lan", 5000, ip_address("10.0.0.9"))
    rules.check_address("example.com", 443, ip_address("93.184.216.34"))
    for address in ("192.168.0.9", "127.0.0.1", "::1", "::ffff:10.0.0.9", "fe80::1"):
        with pytest.raises(Invalid):
            rules.check_address("example.com", 443, ip_address(address))


@pytest.mark.parametrize("entry", ["", "a b", "ftp://x", "10.0.0.0/99", "x/y", "host:port", "user@host", "https://x"])
def test_a_list_that_cannot_be_read_is_refused_at_once(entry: str) -> None:
    with pytest.raises(Invalid) as caught:
        ParsedRules(Rules(allowed=(entry,)))
    assert caught.value.code == "invalid_uri"


@pytest.mark.parametrize(
    ("allowed", "registry", "scheme"),
    [
        ((), "quay.io", "https"),
        ((), "127.0.0.1:5000", "https"),
        (("127.0.0.1",), "127.0.0.1:5000", "http"),
        (("127.0.0.1:5000",), "127.0.0.1:5000", "http"),
        (("127.0.0.1:5000",), "127.0.0.1:5001", "https"),
        (("127.0.0.0/8",), "127.0.0.1:5000", "http"),
        (("localhost:5000",), "localhost:5000", "http"),
        (("[::1]:5000",), "[::1]:5000", "http"),
        (("registry.lan",), "registry.lan:5000", "https"),
        (("http://registry.lan",), "registry.lan", "http"),
        (("http://registry.lan",), "registry.lan:5000", "http"),
        (("http://registry.lan:5000",), "registry.lan:5000", "http"),
        (("http://registry.lan:5000",), "registry.lan", "https"),
        (("10.0.0.0/8",), "10.0.0.1:5000", "https"),
    ],
)
def test_a_registry_is_spoken_to_in_plain_only_where_that_is_said(
    allowed: tuple[str, ...], registry: str, scheme: str
) -> None:
    assert ParsedRules(Rules(allowed=allowed)).scheme_of_registry(registry) == scheme


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1", "64:ff9b::101:101", "223.255.255.254"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(ip_address(address))
