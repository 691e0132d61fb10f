"""At which address others reach a rank: variables, routes, interfaces; IPv4 and IPv6."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from mycel.errors import TopologyError, UsageError
from mycel.runtime.transport.address import Address, names_of_hosts, own_address, store_host
from mycel.settings import read_settings
from mycel.topology import addresses as module
from mycel.topology.addresses import InterfaceAddress, address_towards, interface_addresses, own_ip, resolve, route_to
from mycel.topology.wiring import Wiring, read_wiring, write_wiring


class Named:
    """Stands for torch's store that knows its machine."""

    def __init__(self, host: str) -> None:
        self.host, self.port = host, 1


class Prefixed:
    def __init__(self, store: object) -> None:
        self.underlying_store = store


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_the_kernel_lists_interfaces() -> None:
    found = interface_addresses(loopback=True)
    assert InterfaceAddress(name="lo", ip="127.0.0.1", prefix_bits=8) in found
    assert {each.name for each in found} <= {name for _, name in socket.if_nameindex()} | {
        each.name for each in found if ":" in each.name
    }
    assert not any(ipaddress.ip_address(each.ip).is_loopback for each in interface_addresses())


def test_the_environment_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "wiring.json"
    write_wiring(Wiring(addresses=("10.0.0.1", "fd00::2")), file)
    env = {"MYCEL_WIRING": str(file), "MYCEL_ADDRESS": "10.1.1.1", "MYCEL_INTERFACE": "lo"}
    assert own_ip(read_settings(env), 1) == "fd00::2"
    with pytest.raises(UsageError, match="has addresses for 2 ranks; this is rank 2"):
        own_ip(read_settings(env), 2)
    del env["MYCEL_WIRING"]
    assert own_ip(read_settings(env), 0) == "10.1.1.1"
    del env["MYCEL_ADDRESS"]
    assert own_ip(read_settings(env), 0) == "127.0.0.1"
    assert own_ip(read_settings({}), 0) is None


def test_an_interface_with_both_kinds_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [("ib0", "fd00::7", 64), ("eth0", "fd00::1", 64), ("eth0", "10.0.0.1", 24)]
    made = tuple(InterfaceAddress(name=name, ip=ip, prefix_bits=bits) for name, ip, bits in given)
    monkeypatch.setattr(module, "interface_addresses", lambda *, loopback=False: made)
    assert own_ip(read_settings({"MYCEL_INTERFACE": "eth0"}), 0) == "10.0.0.1"
    assert own_ip(read_settings({"MYCEL_INTERFACE": "ib0"}), 0) == "fd00::7"
    assert own_ip(read_settings({"MYCEL_INTERFACE": "wlan0, ib0"}), 0) == "fd00::7"
    with pytest.raises(
        UsageError, match=r"MYCEL_INTERFACE=wlan0: no such interface.* there are ib0 \(fd00::7\), eth0"
    ):
        own_ip(read_settings({"MYCEL_INTERFACE": "wlan0"}), 0)
    with pytest.raises(UsageError, match="names separated by commas"):
        read_settings({"MYCEL_INTERFACE": "eth0,,"})


def test_a_name_that_maps_to_loopback_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order a resolver gives, an address that leads elsewhere comes first."""
    answer = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 9)), (socket.AF_INET, 0, 0, "", ("10.0.0.7", 9))]
    monkeypatch.setattr(module.socket, "getaddrinfo", lambda *args, **kwargs: answer)
    assert resolve("node0") == ("10.0.0.7", "127.0.1.1")


def test_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert route_to("127.0.1.1") == "127.0.0.1"
    if has_ipv6():
        assert route_to("::1") == "::1"
    monkeypatch.setattr(module, "resolve", lambda host: ("fd00:dead::1", "127.0.0.1"))

    def only_ipv4(ip: str) -> str:
        if ":" in ip:
            raise OSError(101, "Network is unreachable")
        return ip

    monkeypatch.setattr(module, "_source_towards", only_ipv4)
    assert route_to("both") == "127.0.0.1"
    with pytest.raises(OSError, match="is not a name"):
        monkeypatch.undo()
        resolve("x" * 300)


def test_where_a_name_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str) -> tuple[str, ...]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(module, "resolve", unknown)
    with pytest.raises(UsageError, match="MYCEL_ADDRESS='nowhere': no such address or name: Name or service"):
        own_ip(read_settings({"MYCEL_ADDRESS": "nowhere"}), 0)
    own = own_address(read_settings({"MASTER_ADDR": "nowhere"}), 0)
    assert own.ip == "127.0.0.1"
    assert own.networks == tuple(each.text for each in interface_addresses())


def test_the_store_says_where_it_is() -> None:
    assert store_host(Prefixed(Prefixed(Named("node7")))) == "node7"
    assert store_host(object()) is None
    own = own_address(read_settings({"MASTER_ADDR": "10.255.255.255"}), 0, Prefixed(Named("127.0.1.1")))
    assert own.ip == "127.0.0.1"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([["10.0.0.2/24"]], "10.0.0.1"),
        ([["192.168.9.9/24"], ["172.16.0.9/16"]], "172.16.3.4"),
        ([["fd00::2/64"]], "fd00::1"),
        ([["127.0.0.1/8", "10.0.0.9"]], "10.0.0.1"),
    ],
)
def test_an_address_in_a_network_of_anothers(
    others: list[list[str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [("eth0", "10.0.0.1", 24), ("eth1", "172.16.3.4", 16), ("eth0", "fd00::1", 64)]
    made = tuple(InterfaceAddress(name=name, ip=ip, prefix_bits=bits) for name, ip, bits in given)
    monkeypatch.setattr(module, "interface_addresses", lambda *, loopback=False: made)
    assert address_towards(others) == expected


def test_no_network_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_addresses", lambda *, loopback=False: ())
    monkeypatch.setattr(module, "_source_towards", lambda ip: "10.5.5.5")
    assert address_towards([["10.9.9.9"]]) == "10.5.5.5"
    monkeypatch.setattr(module, "_source_towards", lambda ip: "127.0.0.1")
    assert address_towards([["10.9.9.9"]]) is None
    assert address_towards([]) is None


def test_addresses_as_text() -> None:
    own = own_address(read_settings({}), 0)
    assert Address.from_text(own.to_text()) == own
    assert own.host.partition("/")[0], "a machine has an identity"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"host": 1}'])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(RuntimeError, match="not an address of this release"):
        Address.from_text(text)


@pytest.mark.parametrize(("field", "value"), [('"port": 0', '"port": "0"'), ("127.0.0.1", "name")])
def test_an_address_with_a_wrong_part(field: str, value: str) -> None:
    text = Address(host="a", ip="127.0.0.1", port=0, pid=1).to_text()
    assert field in text
    with pytest.raises(RuntimeError, match="not an address"):
        Address.from_text(text.replace(field, value))


def test_hosts_of_one_name_are_told_apart() -> None:
    def at(host: str, name: str) -> Address:
        return Address(host=host, ip="10.0.0.1", port=1, pid=1, name=name)

    names = names_of_hosts([at("a/1", "ubuntu"), at("b/1", "ubuntu"), at("a/1", "other"), at("c/1", "ubuntu.2")])
    assert names[0] == names[2]
    assert len(set(names)) == 3


def test_wirings_hold_addresses_and_not_names(tmp_path: Path) -> None:
    file = tmp_path / "wiring.json"
    wiring = Wiring(addresses=("10.0.0.1", "fd00::2"), paths={(0, 2, 1): "fd00::3"})
    write_wiring(wiring, file)
    assert read_wiring(file) == wiring
    file.write_text(file.read_text().replace("fd00::3", "node3"))
    with pytest.raises(TopologyError, match="not a wiring: 'node3' does not appear"):
        read_wiring(file)
