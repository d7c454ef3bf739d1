import pytest

from autopipe.core.telemetry.counters import Unreadable, Unsupported
from autopipe.core.telemetry.rapl import Rapl


def zone(root, number, name, energy_uj, most_uj=1_000_000):
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{most_uj}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def test_packages_and_memory_are_added_and_nothing_counts_twice(tmp_path):
    zone(tmp_path, "0", "package-0", 100_000)
    zone(tmp_path, "0:0", "core", 50_000)
    zone(tmp_path, "0:1", "dram", 20_000)
    zone(tmp_path, "1", "package-1", 300_000)
    zone(tmp_path, "2", "psys", 900_000)
    mmio = tmp_path / "intel-rapl-mmio:0"
    mmio.mkdir()
    (mmio / "name").write_text("package-0\n")
    assert Rapl(tmp_path).read().total_j == pytest.approx(0.42)


def test_wrap_around_is_undone(tmp_path):
    counter = zone(tmp_path, "0", "package-0", 999_900, most_uj=999_999)
    rapl = Rapl(tmp_path)
    before = rapl.read()
    counter.write_text("100\n")
    after = rapl.read()
    assert after.epoch == before.epoch
    assert after.total_j - before.total_j == pytest.approx(200e-6)


def test_machine_without_rapl_is_unsupported(tmp_path):
    with pytest.raises(Unsupported, match="no RAPL"):
        Rapl(tmp_path / "nowhere").read()


def test_missing_permission_says_what_to_do(tmp_path, monkeypatch):
    counter = zone(tmp_path, "0", "package-0", 1)
    original = type(counter).read_text

    def refuse(path, *arguments, **keywords):
        if path == counter:
            raise PermissionError("no")
        return original(path, *arguments, **keywords)

    monkeypatch.setattr(type(counter), "read_text", refuse)
    with pytest.raises(Unsupported, match=r"chmod o\+r .*energy_uj"):
        Rapl(tmp_path).read()


def test_counter_that_fails_for_a_moment_is_unreadable(tmp_path):
    counter = zone(tmp_path, "0", "package-0", 100)
    rapl = Rapl(tmp_path)
    rapl.read()
    counter.write_text("")
    with pytest.raises(Unreadable):
        rapl.read()
