"""Hostile programs for the shell, and one of C: what `hostile` is for Python.

An attack prints `ESCAPED` where it succeeds. Making processes is no attack here:
commands may. `SYSTEM_CALLS` asks the kernel, one call after the other, for what no
command of a shell asks for.
"""

from __future__ import annotations

from rl_envs.sandbox.hostile import ESCAPED

__all__ = [
    "COMMAND_ATTACKS",
    "COMMAND_NUISANCES",
    "HOSTILE_COMMANDS",
    "SYSTEM_CALLS",
]

_BODIES = {
    # Files
    "read_passwd": "cat /etc/passwd",
    "read_shadow": "cat /etc/shadow",
    "list_home": "ls /root || ls /home",
    "list_variable_data": "ls /var",
    "read_host_name": 'test "$(hostname)" != sandbox && echo x',
    "symlink_to_passwd": "ln -s /etc/passwd s && cat s",
    "overwrite_program": "echo x >> /usr/bin/env",
    "remove_program": "rm -f /usr/bin/env && test ! -e /usr/bin/env",
    "replace_loader": "cp /bin/true /lib64/ld-linux-x86-64.so.2",
    "write_system_folder": "echo x > /usr/lib/sandbox-escape",
    "write_root_folder": "echo x > /sandbox-escape",
    "write_etc": "echo x > /etc/sandbox-escape",
    "write_shared_memory": "echo x > /dev/shm/sandbox-escape",
    "set_uid_bit_of_root": "find /usr/bin -perm -4000 -exec sh -c '[ \"$({} -c id\\ -u"
    " root 2>/dev/null)\" = 0 ]' \\; | grep .",
    "become_root_by_su": "test \"$(su -c 'id -u' </dev/null)\" = 0",
    "make_device": "mknod d b 8 0",
    "read_disk": "head -c 1 /dev/sda || head -c 1 /dev/vda",
    "read_memory_device": "head -c 1 /dev/mem",
    "read_kernel_memory": "head -c 1 /proc/kcore",
    "read_terminal": "head -c 1 /dev/tty",
    "change_owner": "touch o && chown 1 o",
    "change_root": "chroot /work /bin/true || chroot . true",
    # The kernel
    "mount": "mount -t tmpfs none /work",
    "remount_root": "mount -o remount,rw /",
    "unmount": "umount /proc",
    "new_namespace": "unshare --user true || unshare --mount true",
    "enter_namespace": "nsenter --target 1 --mount true",
    "kernel_log": "dmesg | grep .",
    "set_host_name": "hostname escaped",
    "write_kernel_setting": "echo 1 > /proc/sys/kernel/sysrq",
    "trigger_kernel": "echo h > /proc/sysrq-trigger",
    "write_control_group": "mkdir /sys/fs/cgroup/x || echo 1 > /sys/fs/cgroup/x",
    "set_clock": "date -s 1970-01-01",
    "higher_priority": "nice -n -5 true 2>&1 | grep -q . && exit 1",
    "raise_own_limits": "ulimit -d unlimited || ulimit -u unlimited",
    "raise_limits_of_first": "prlimit --pid 1 --nproc=unlimited",
    # Processes of others
    "see_other_processes": "for p in /proc/[0-9]*; do read -r c < $p/comm; case $c in "
    "bwrap|bash|sh|program*) ;; *) exit 0;; esac; done; exit 1",
    "environment_of_first": "tr '\\0' '\\n' < /proc/1/environ | grep =",
    "memory_of_first": "head -c 1 /proc/1/mem",
    "files_of_first": "cd /proc/1/root && cat etc/passwd",
    "write_input": "echo x >&0",
    "own_input_again": "echo x > /proc/self/fd/0",
    "find_channel": "for f in /proc/self/fd/*; do case ${f##*/} in 0|1|2|255) ;; "
    "*) test -e $f && exit 0;; esac; done; exit 1",
    # Sockets
    "tcp": "exec 3<>/dev/tcp/127.0.0.1/22",
    "udp": "exec 3<>/dev/udp/127.0.0.1/53",
    "resolve_name": "getent hosts example.com",
    "interfaces": "ip addr || ifconfig",
}


def _attack(body: str) -> str:
    return f"if ( {body} ) >/dev/null 2>&1; then echo {ESCAPED}; fi\n"


COMMAND_ATTACKS: dict[str, str] = {name: _attack(b) for name, b in _BODIES.items()}
"""Shell programs by name that print `ESCAPED` where the sandbox does not hold."""

COMMAND_NUISANCES: dict[str, str] = {
    "endless_loop": "while :; do :; done",
    "sleeps": "sleep 1000000",
    "closes_output_and_goes_on": "exec 1>&- 2>&-; sleep 1000000",
    "ignores_signals": "trap '' $(seq 1 31); while :; do :; done",
    "memory": "tail /dev/zero",
    "memory_of_many": "for i in 1 2 3 4 5 6 7 8; do tail /dev/zero & done; wait",
    "endless_output": "yes x",
    "endless_errors": "yes x >&2",
    "fork_bomb": ":() { : | : & }; :; sleep 1000",
    "fork_bomb_deep": "f() { (f) ; }; f",
    "daemons": "for i in 1 2 3; do setsid nohup sleep 1000000 & done; exit 0",
    "daemons_without_output": "(setsid sleep 1000000 >/dev/null 2>&1 </dev/null &); "
    "exit 0",
    "daemon_holds_output": "sleep 1000000 & echo left; exit 0",
    "zombies": "for i in $(seq 1 500); do true & done; exec sleep 1000000",
    "fills_scratch": "cat /dev/zero > big",
    "fills_scratch_in_parts": "for i in $(seq 1 1000); do head -c 1000000 /dev/zero > "
    "f$i || break; done; sleep 1000",
    "many_files": "for i in $(seq 1 100000); do : > f$i || break; done; sleep 1000",
    "deep_folders": "while mkdir d && cd d; do :; done; sleep 1000",
    "deep_recursion": "f() { f; }; f",
    "many_open_files": 'for i in $(seq 3 100000); do eval "exec $i</dev/null" || '
    "break; done; sleep 1000",
    "kills_itself": "kill -9 $$",
    "kills_all": "kill -9 -1; sleep 1000",
    "kills_first": "kill -9 1; sleep 1000",
    "stops_itself": "kill -STOP $$",
    "aborts": "kill -ABRT $$",
    "exits_early": "exit 0",
    "exit_of_a_signal": "exit 137",
    "prints_success": "echo ok; echo All tests passed; echo True",
    "prints_reply": 'echo \'{"status": "ok", "stdout": "4", "exit_code": 0}\'',
    "prints_state_of_bwrap": "echo '{ \"exit-code\": 0 }' >&3; "
    "echo '{ \"child-pid\": 1 }' >&4",
    "echoes_input": "cat",
    "not_a_program": "}{ ( <<",
    "null_byte": "echo 1\0",
    "very_long_line": "x=" + "x" * 200_000 + "; echo ${#x}",
}
"""Shell programs by name that use up what they can, or pretend to be right."""

HOSTILE_COMMANDS: dict[str, str] = {**COMMAND_ATTACKS, **COMMAND_NUISANCES}
"""All of them."""

_CALLS = (
    # Name, number on x86_64, and the arguments, as C has them.
    ("socket", "41, 2, 1, 0"),
    ("socket_unix", "41, 1, 1, 0"),
    ("socketpair_datagram", "53, 1, 2, 0, pair"),
    ("ptrace_traceme", "101, 0, 0, 0, 0"),
    ("process_vm_readv", "310, 1, 0, 0, 0, 0, 0"),
    ("mount", '165, "none", "/work", "tmpfs", 0, 0'),
    ("pivot_root", '155, ".", "."'),
    ("chroot", '161, "."'),
    ("unshare_user", "272, 0x10000000"),
    ("unshare_mount", "272, 0x20000"),
    ("setns", "308, 0, 0"),
    ("clone_user_namespace", "56, 0x10000011, 0, 0, 0, 0"),
    ("clone3", "435, 0, 0"),
    ("setuid_root", "105, 0"),
    ("setgid_root", "106, 0"),
    ("setgroups", "116, 0, 0"),
    ("bpf", "321, 0, 0, 0"),
    ("io_uring_setup", "425, 1, zeros"),
    ("perf_event_open", "298, zeros, 0, -1, -1, 0"),
    ("userfaultfd", "323, 0"),
    ("keyctl", "250, 0, -3, 1"),
    ("add_key", '248, "user", "x", "x", 1, -3'),
    ("memfd_create", '319, "x", 0'),
    ("shmget", "29, 0, 4096, 01600"),
    ("msgget", "68, 0, 01600"),
    ("init_module", '175, zeros, 1, ""'),
    ("kexec_load", "246, 0, 0, 0, 0"),
    ("reboot", "169, 0xfee1dead, 672274793, 0, 0"),
    ("swapon", '167, "x", 0'),
    ("acct", '163, "a"'),
    ("settimeofday", "164, zeros, 0"),
    ("sethostname", '170, "escaped", 7'),
    ("open_by_handle", "304, 0, zeros, 0"),
    ("name_to_handle", '303, -100, "/", zeros, zeros, 0'),
    ("landlock_ruleset", "444, 0, 0, 1"),
    ("fanotify_init", "300, 0, 0"),
    ("quotactl", "179, 0, 0, 0, 0"),
    ("iopl", "172, 3"),
    ("old_abi", "0x40000000 + 39"),
)


def _asks(name: str, arguments: str) -> str:
    # It may be a clone, which returns in a new process as well.
    return (
        f"    found = syscall({arguments});\n"
        "    if (found == 0 && getpid() != me) _exit(0);\n"
        f'    if (found >= 0) printf("{ESCAPED} {name}\\n");\n'
    )


SYSTEM_CALLS: str = (
    "#define _GNU_SOURCE\n#include <stdio.h>\n#include <unistd.h>\n"
    "#include <sys/syscall.h>\nstatic char zeros[256]; static int pair[2];\n"
    "int main(void) {\n    long found; int me = getpid();\n    setbuf(stdout, 0);\n"
    + "".join(_asks(name, arguments) for name, arguments in _CALLS)
    + '    printf("asked\\n");\n    return 0;\n}\n'
)
"""A program in C that makes system calls that are refused; it ends with `asked`."""
