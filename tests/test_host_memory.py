"""What the host has left, read from files made up for the test."""

import pytest

from umem._common import host
from umem._common.host import available_bytes

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    write({"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:    {8 * GIB // 1024} kB\n"})
    return write


def v2(folder, limit, used, inactive=0):
    return {
        f"sys/fs/cgroup{folder}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def v1(folder, limit, used, inactive=0):
    return {
        f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory{folder}/memory.usage_in_bytes": f"{used}\n",
        f"sys/fs/cgroup/memory{folder}/memory.stat": f"total_inactive_file {inactive}\n",
    }


def test_without_groups_the_kernels_estimate_counts(machine):
    assert available_bytes(machine({})) == 8 * GIB


def test_the_memory_of_a_gpu_that_is_a_numa_node_is_not_the_hosts(machine, monkeypatch):
    monkeypatch.setattr(host, "GPU_NODES", {1})
    text = "Node 1 MemTotal: 9 kB\nNode 1 MemFree: 2097152 kB\nNode 1 FilePages: 1048576 kB\n"
    root = machine({"sys/devices/system/node/node1/meminfo": text})
    assert available_bytes(root) == 5 * GIB
    monkeypatch.setattr(host, "GPU_NODES", {0, 2})  # nothing says what they have
    assert available_bytes(root) == 8 * GIB


def test_a_version_2_group_bounds_it_and_page_cache_is_free(machine):
    root = machine({"proc/self/cgroup": "0::/job\n", **v2("/job", 4 * GIB, 3 * GIB, GIB)})
    assert available_bytes(root) == 2 * GIB


def test_a_parent_group_bounds_it_too(machine):
    files = {**v2("/a/b", "max", GIB), **v2("/a", 3 * GIB, 2 * GIB)}
    assert available_bytes(machine({"proc/self/cgroup": "0::/a/b\n", **files})) == GIB


def test_in_a_container_the_root_of_the_mount_is_the_group(machine):
    files = {"proc/self/cgroup": "0::/not/visible/here\n", **v2("", 2 * GIB, GIB)}
    assert available_bytes(machine(files)) == GIB


def test_a_version_1_group_bounds_it(machine):
    files = {"proc/self/cgroup": "4:cpu,memory:/job\n0::/\n", **v1("/job", 4 * GIB, 3 * GIB)}
    assert available_bytes(machine(files)) == GIB


def test_version_1s_number_for_no_limit_is_no_limit(machine):
    files = {"proc/self/cgroup": "4:memory:/\n", **v1("", V1_UNLIMITED, 3 * GIB)}
    assert available_bytes(machine(files)) == 8 * GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    root = machine({"proc/self/cgroup": "0::/\n", **v2("", GIB, 2 * GIB)})
    assert available_bytes(root) == 0


def test_where_nothing_can_be_read_it_is_unknown(tmp_path):
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some():
    assert available_bytes() is None or available_bytes() > 0
