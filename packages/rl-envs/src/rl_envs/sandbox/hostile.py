"""Hostile programs, all of which a sandbox must survive.

An attack prints `ESCAPED` if it succeeds. The others exhaust resources, or print
output that a careless checker would reward; none solves the task in its input.
"""

from __future__ import annotations

import textwrap

__all__ = ["ATTACKS", "ESCAPED", "HOSTILE", "NUISANCES"]

ESCAPED = "ESCAPED"
"""Output of an attack that succeeds."""

# Direct system calls, for those that Python has no function for: a filter that only
# covered the C library's wrappers would miss them.
_SYSCALL = "import ctypes; c = ctypes.CDLL(None); assert c.syscall"
_BODIES = {
    # Files
    "read_passwd": "open('/etc/passwd').read()",
    "read_shadow": "open('/etc/shadow').read()",
    "list_root": "import os; os.listdir('/')",
    "list_home": "import os; os.listdir('/root')",
    "list_temporary": "import os; os.listdir('/tmp')",
    "write_temporary": "open('/tmp/sandbox-escape', 'w').write('x')",
    "write_shared_memory": "open('/dev/shm/sandbox-escape', 'w').write('x')",
    "write_var_tmp": "open('/var/tmp/sandbox-escape', 'w').write('x')",
    "write_parent_folder": "open('../sandbox-escape', 'w').write('x')",
    "symlink_to_passwd": "import os; os.symlink('/etc/passwd', 's'); open('s').read()",
    "hard_link_passwd": "import os; os.link('/etc/passwd', 'h'); open('h').read()",
    "rename_out": "import os; open('r', 'w'); os.rename('r', '/tmp/sandbox-escape')",
    "make_folder_outside": "import os; os.mkdir('/tmp/sandbox-escape')",
    "overwrite_library": "import json; open(json.__file__, 'a')",
    "change_root": "import os; os.chroot('.')",
    "set_uid_bit": "import os; open('p', 'w'); os.chmod('p', 0o4755)",
    "change_owner": "import os; open('o', 'w'); os.chown('o', 0, 0)",
    "make_device": "import os; os.mknod('d', 0o60666, os.makedev(8, 0))",
    "read_memory_device": "open('/dev/mem', 'rb').read(1)",
    "read_disk": "open('/dev/sda', 'rb').read(1); open('/dev/vda', 'rb').read(1)",
    "read_terminal": "open('/dev/tty')",
    # /proc and others' processes
    "read_parent_environment": (
        "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()"
    ),
    "read_parent_memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "list_parent_files": "import os; os.listdir(f'/proc/{os.getppid()}/fd')",
    "parent_pipe_by_proc": "import os; open(f'/proc/{os.getppid()}/fd/1', 'wb')",
    "parent_root_by_proc": (
        "import os; place = ('/proc', str(os.getppid()), 'root', 'etc', 'passwd')"
        "; open(os.path.join(*place)).read()"
    ),
    "read_command_lines": "open('/proc/1/cmdline').read()",
    "write_own_memory_by_proc": "open('/proc/self/mem', 'r+b')",
    "reopen_input_for_writing": "open('/proc/self/fd/0', 'r+b', 0).write(b'x')",
    "write_input": "import os; os.write(0, b'x')",
    "truncate_input": "import os; os.ftruncate(0, 1 << 20)",
    "find_channel": textwrap.dedent(
        """
        import os
        open_files = []
        for handle in range(3, 1024):
            try:
                os.fstat(handle)
            except OSError:
                continue
            open_files.append(handle)
        assert open_files
        """
    ),
    "kill_parent": "import os; os.kill(os.getppid(), 9)",
    "stop_parent": "import os; os.kill(os.getppid(), 19)",
    "kill_all": "import os; os.kill(-1, 9)",
    "kill_first_process": "import os; os.kill(1, 15)",
    "kill_group": "import os; os.killpg(os.getpgid(os.getppid()), 9)",
    "trace_parent": (
        "import os, ctypes; "
        "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0"
    ),
    "trace_itself": "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
    "read_parent_by_syscall": f"import os; {_SYSCALL}(310, os.getppid(), 0,0,0,0,0)==0",
    "raise_parent_limits": (
        "import os, resource; "
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))"
    ),
    "pidfd_of_parent": "import os; os.pidfd_open(os.getppid())",
    # New processes and programs
    "fork": "import os; os.fork() or os._exit(0)",
    "spawn": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "shell": "import os; assert os.system('true') == 0",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "daemon": "import os; os.fork() or (os.setsid(), os.fork())",
    "vfork": f"{_SYSCALL}(58) >= 0",
    "clone_process": f"{_SYSCALL}(56, 17, 0, 0, 0, 0) >= 0",
    "multiprocessing": (
        "import multiprocessing as m; p = m.get_context('fork').Process(); p.start()"
    ),
    # Sockets
    "tcp": "import socket; socket.socket()",
    "tcp_v6": "import socket; socket.socket(socket.AF_INET6)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "raw_socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "abstract_socket": (
        "import socket; socket.socket(socket.AF_UNIX).bind('\\0sandbox-escape')"
    ),
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "vsock": "import socket; socket.socket(socket.AF_VSOCK)",
    "datagram_pair": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "resolve_name": "import socket; socket.gethostbyname('example.com')",
    # The kernel
    "become_root": "import os; os.setuid(0)",
    "become_root_group": "import os; os.setgroups([0])",
    "unshare_user": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "mount": (
        "import ctypes; "
        "assert ctypes.CDLL(None).mount(b'none', b'.', b'tmpfs', 0, None) == 0"
    ),
    "unmount": "import ctypes; assert ctypes.CDLL(None).umount2(b'.', 2) == 0",
    "io_uring": f"{_SYSCALL}(425, 8, ctypes.create_string_buffer(120)) >= 0",
    "bpf": f"{_SYSCALL}(321, 0, ctypes.create_string_buffer(64), 64) >= 0",
    "perf_events": f"{_SYSCALL}(298, ctypes.create_string_buffer(128),0,-1,-1,0) >= 0",
    "userfaultfd": f"{_SYSCALL}(323, 0) >= 0",
    "keyring": f"{_SYSCALL}(250, 0, -3, 1) >= 0",
    "shared_memory_segment": f"{_SYSCALL}(29, 0, 4096, 0o1600) >= 0",
    "file_in_memory": "import os; os.memfd_create('x')",
    "old_abi": f"{_SYSCALL}(0x40000000 + 39) >= 0",
    "raise_own_limits": (
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))"
    ),
    "higher_priority": "import os; os.nice(-5)",
    "set_clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host_name": "import socket; socket.sethostname('escaped')",
}


# A failed attempt is the expected outcome, and stays silent.
def _attack(body: str) -> str:
    attempt = textwrap.indent(body.strip(), "    ")
    return f"try:\n{attempt}\n    print({ESCAPED!r})\nexcept Exception:\n    pass\n"


ATTACKS: dict[str, str] = {name: _attack(body) for name, body in _BODIES.items()}
"""Programs by name that print `ESCAPED` if the sandbox does not hold."""

NUISANCES: dict[str, str] = {
    "endless_loop": "while True: pass",
    "sleeps": "import time; time.sleep(1e6)",
    "closes_output_and_goes_on": "import os, time\nos.close(1); os.close(2)\n"
    "time.sleep(1e6)",
    "ignores_signals": "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, "
    "signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "memory_at_once": "x = bytearray(1 << 40)",
    "big_number": "x = 9 ** 9 ** 9",
    "endless_output": "while True: print('x' * 10000)",
    "endless_errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "threads": "import threading, time\nwhile True: "
    "threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "fork_bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "fills_scratch": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many_files": "for i in range(10 ** 9): open(f'f{i}', 'w').close()",
    "many_open_files": "import os\nx = [os.open('.', 0) for _ in range(10 ** 6)]",
    "fills_pipes": "import os\nwhile True:\n  r, w = os.pipe()\n"
    "  os.write(w, bytes(1 << 16))",
    "deep_recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\n"
    "f = lambda: f()\nf()",
    "segmentation_fault": "import ctypes; ctypes.string_at(0)",
    "smashes_stack": "import ctypes\nb = ctypes.create_string_buffer(8)\n"
    "ctypes.memset(b, 65, 1 << 26)",
    "kills_itself": "import os; os.kill(os.getpid(), 9)",
    "aborts": "import os; os.abort()",
    "huge_pickle": "import pickle\n"
    "pickle.loads(b'\\x80\\x04\\x8e' + (1 << 40).to_bytes(8, 'little'))",
    "hash_collisions": "print(len({i * (2 ** 61 - 1): 0 for i in range(10 ** 5)}))",
    "slow_pattern": "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
    "exits_early": "raise SystemExit(0)",
    "exits_early_hard": "import os; os._exit(0)",
    "exit_in_thread": "import threading, os\n"
    "threading.Thread(target=os._exit, args=(0,)).start()",
    "prints_success": "print('ok'); print('All tests passed'); print(True)",
    "prints_reply": 'print(\'{"status": "ok", "stdout": "4", "exit_code": 0}\')',
    "echoes_input": "print(input())",
    "equal_to_all": "class A:\n  __eq__ = lambda a, b: True\n"
    "  __str__ = lambda a: '*'\nprint(A())",
    "patches_builtins": "import builtins, sys\nbuiltins.len = lambda x: 1\n"
    "builtins.print = lambda *a: None\nsys.modules.clear()",
    "patches_streams": "import sys\nsys.stdout = None; sys.stderr = None",
    "returns_to_zygote": "import sys, gc\nf = sys._getframe()\n"
    "while f.f_back: f = f.f_back\nz = f.f_locals.get('zygote')\n"
    "z and z.run({'code': 'print(1)', 'stdin': ''})",
    "poisons_modules": "import json, math\njson.loads = math.sqrt = lambda *a: 0",
    "not_python": "}{ this is no program",
    "null_byte": "print(1)\0",
}
"""Programs by name that exhaust resources or pretend to be correct."""

HOSTILE: dict[str, str] = {**ATTACKS, **NUISANCES}
"""All attacks and nuisances."""
