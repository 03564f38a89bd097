"""Programs that try to harm the machine. Each prints "escaped" where it gets what it should not."""

from __future__ import annotations

# What becomes of it: "" = it comes to an end, whichever; else a word of why it has to be stopped.
PROGRAMS: dict[str, tuple[str, str]] = {
    # --- processes ---
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "longer"),
    "fork bomb in a shell": ("import os\nos.system(':(){ :|:& };:')\nwhile True: pass", "longer"),
    "more processes than allowed": (
        "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(9)\nprint('escaped')",
        "",
    ),
    "more threads than allowed": (
        "import threading, time\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "print('escaped')",
        "",
    ),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)",
        "",
    ),
    "nohup": ("import subprocess\nsubprocess.Popen(['nohup', 'sleep', '600'], start_new_session=True)", ""),
    "exec": ("import os\nos.execvp('sleep', ['sleep', '600'])", "longer"),
    "zombies": ("import os\nfor _ in range(12):\n    if os.fork() == 0: os._exit(0)\nwhile True: pass", "longer"),
    "many quick children": ("import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()", "longer"),
    "exit at once": ("import os\nos._exit(0)", "code 0"),
    "abort": ("import os\nos.abort()", "code -6"),
    "null pointer": ("import ctypes\nctypes.string_at(0)", "code -11"),
    # --- signals ---
    "kill everybody": ("import os\nos.kill(-1, 9)\nprint('escaped')", ""),
    "kill the first process": (
        "import os, time\nos.kill(1, 9)\ntime.sleep(.1)\nprint('escaped' if not os.path.exists('/proc/1') else '')",
        "",
    ),
    "stop the first process": ("import os, signal\nos.kill(1, signal.SIGSTOP)\nwhile True: pass", "longer"),
    "interrupt the first process": (
        "import os, signal\nfor number in range(1, 65):\n"
        "    if number not in (9, 19): os.kill(1, number)\nwhile True: pass",
        "longer",
    ),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)\nwhile True: pass", "longer"),
    "kill the group": ("import os\nos.killpg(0, 9)", "code -9"),
    "kill the process group of the host": (
        "import os\nfor pid in range(2, 40000):\n    try:\n"
        "        if pid != os.getpid(): os.kill(pid, 9); print('escaped')\n"
        "    except OSError: pass",
        "",
    ),
    "ignore every signal": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        "longer",
    ),
    "ignore the limit of processor time": (
        "import signal, threading\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "longer",
    ),
    # --- time ---
    "endless loop": ("while True: pass", "longer"),
    "long sleep": ("import time\ntime.sleep(600)", "longer"),
    "long product": ("9 ** 9 ** 9", "longer"),
    "catastrophic pattern": ("import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "longer"),
    "wait for input": ("import sys\nwhile True: sys.stdin.read()", "longer"),
    "exceptions are caught": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "longer",
    ),
    "threads that spin": (
        "import threading\ndef spin():\n    while True: pass\nfor _ in range(8): threading.Thread(target=spin).start()",
        "longer",
    ),
    "children that spin": (
        "import os\nfor _ in range(8):\n    if os.fork() == 0:\n        while True: pass\nwhile True: pass",
        "longer",
    ),
    # --- memory ---
    "memory bomb": ("data = []\nwhile True: data.append(bytearray(2**24))", ""),
    "one large block": ("bytearray(2**36)\nprint('escaped')", ""),
    "long text": ("x = 'x'\nwhile True: x += x", ""),
    "memory of many children": (
        "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(b'x' * 60_000_000)\ntime.sleep(600)\n",
        "it ",
    ),
    "shared memory that nobody maps": (
        "import os\nfor _ in range(40):\n    os.write(os.memfd_create('x'), bytes(2**20))\nprint('escaped')",
        "",
    ),
    "System V shared memory": (
        "import ctypes\nif ctypes.CDLL(None).shmget(0, 2**20, 0o1666) >= 0: print('escaped')",
        "",
    ),
    "System V queue": ("import ctypes\nif ctypes.CDLL(None).msgget(0, 0o1666) >= 0: print('escaped')", ""),
    "System V semaphores": (
        "import ctypes\nif ctypes.CDLL(None).semget(0, 32000, 0o1666) >= 0: print('escaped')",
        "",
    ),
    "memory of sockets": (
        "import os, socket, time\nfor _ in range(3): os.fork()\nkept = []\ntry:\n    while True:\n"
        "        kept += socket.socketpair()\n        kept[-1].setblocking(False)\n        try:\n"
        "            while True: kept[-1].send(bytes(65536))\n        except BlockingIOError: pass\n"
        "except OSError: pass\nif len(kept) > 50: time.sleep(9)",
        "it ",
    ),
    "larger buffers of sockets": (
        "import socket\none, _ = socket.socketpair()\none.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)\n"
        "print('escaped')",
        "",
    ),
    "empty files without end": (
        "import os\nos.chdir('/tmp')\nfor n in range(10**9): os.close(os.open(str(n), os.O_CREAT))",
        "",
    ),
    "locked memory": (
        "import ctypes, mmap\nm = mmap.mmap(-1, 2**27)\nif ctypes.CDLL(None).mlockall(3) == 0: print('escaped')",
        "",
    ),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
    "nested brackets": ("eval('(' * 100_000)", ""),
    # --- disk ---
    "one large file": (
        "with open('/tmp/x', 'wb') as f:\n    for _ in range(64): f.write(bytes(2**20))\nprint('escaped')",
        "",
    ),
    "many files": (
        "for n in range(64):\n    with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(2**20))\nprint('escaped')",
        "",
    ),
    "files in /dev/shm": (
        "for n in range(64):\n    with open(f'/dev/shm/{n}', 'wb') as f: f.write(bytes(2**20))\nprint('escaped')",
        "",
    ),
    "files in /dev": ("open('/dev/x', 'wb').write(b'x')\nprint('escaped')", ""),
    "files in /": ("open('/x', 'wb').write(b'x')\nprint('escaped')", ""),
    "files in /usr": ("open('/usr/x', 'wb').write(b'x')\nprint('escaped')", ""),
    "remove everything": (
        "import subprocess, os\nsubprocess.run(['rm', '-rf', '--no-preserve-root', '/'], stderr=-3)\n"
        "print('' if os.path.exists('/usr/bin/python3') else 'escaped')",
        "",
    ),
    "too many open files": ("files = [open('/dev/null') for _ in range(2000)]\nprint('escaped')", ""),
    "sparse file": ("with open('/tmp/x', 'wb') as f: f.truncate(2**40)\nprint('escaped')", ""),
    # --- network ---
    "connect": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\nprint('escaped')", ""),
    "datagram": (
        "import socket\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))\nprint('escaped')",
        "",
    ),
    "name": ("import socket\nsocket.getaddrinfo('example.com', 80)\nprint('escaped')", ""),
    "interfaces": ("import socket\nprint('escaped' if len(socket.if_nameindex()) > 1 else '')", ""),
    "port of the host": (
        "import socket\nfor port in PORTS:\n    socket.create_connection(('127.0.0.1', port), 1)\nprint('escaped')",
        "",
    ),
    "abstract socket of the host": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0ADDRESS')\nprint('escaped')",
        "",
    ),
    "socket of the hypervisor": ("import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint('escaped')", ""),
    "sockets of a network": (
        "import socket\nfor family in range(46):\n    for kind in range(1, 11):\n"
        "        try: socket.socket(family, kind)\n"
        "        except OSError: continue\n        if family != socket.AF_UNIX: print('escaped', family)",
        "",
    ),
    "raw packets": ("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('escaped')", ""),
    "netlink": (
        "import subprocess\n"
        "if subprocess.run(['ip', 'link', 'add', 'x', 'type', 'dummy'], stderr=-3).returncode == 0:\n"
        "    print('escaped')",
        "",
    ),
    # --- the host's files ---
    "passwords": ("print(open('/etc/shadow').read())\nprint('escaped')", ""),
    "users": ("print(open('/etc/passwd').read())\nprint('escaped')", ""),
    "secret file": ("print(open('SECRET').read())\nprint('escaped')", ""),
    "home": ("import os\nprint('escaped' if any(map(os.path.exists, ('/root', '/home', '/var'))) else '')", ""),
    "symbolic link": (
        "import os\nos.symlink('SECRET', '/tmp/link')\nprint(open('/tmp/link').read())\nprint('escaped')",
        "",
    ),
    "hard link": ("import os\nos.link('/usr/bin/python3', '/tmp/link')\nprint('escaped')", ""),
    "symbolic link to the root of another": (
        "import os\nfor pid in os.listdir('/proc'):\n"
        "    if pid.isdigit() and os.path.exists(f'/proc/{pid}/root' 'SECRET'):\n"
        "        print('escaped')",
        "",
    ),
    "device": ("import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))\nprint('escaped')", ""),
    "disks": (
        "import os\nprint('escaped' if any(n.startswith(('sd', 'vd', 'nvme')) for n in os.listdir('/dev')) else '')",
        "",
    ),
    "environment of the host": ("import os\nprint('escaped' if 'HOSTILE_TEST' in os.environ else '')", ""),
    "open descriptors": (
        "import os\nfor n in os.listdir('/proc/self/fd'):\n    try: target = os.readlink(f'/proc/self/fd/{n}')\n"
        "    except OSError: continue\n"
        "    if target.startswith('/') and not target.startswith(('/dev/null', '/proc', '/tmp')):\n"
        "        print('escaped', target)",
        "",
    ),
    # --- /proc, privileges, the kernel ---
    "environment of the first process": ("print(open('/proc/1/environ').read())\nprint('escaped')", ""),
    "memory of the first process": ("open('/proc/1/mem', 'r+b')\nprint('escaped')", ""),
    "descriptors of the first process": ("import os\nos.listdir('/proc/1/fd')\nprint('escaped')", ""),
    "processes of the host": (
        "import os\nprint('escaped' if sum(n.isdigit() for n in os.listdir('/proc')) > 2 else '')",
        "",
    ),
    "settings of the kernel": ("open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')\nprint('escaped')", ""),
    "magic key": ("open('/proc/sysrq-trigger', 'w').write('b')\nprint('escaped')", ""),
    "kernel memory": ("open('/proc/kcore', 'rb').read(1)\nprint('escaped')", ""),
    "spared by the kernel": ("with open('/proc/self/oom_score_adj', 'w') as f: f.write('-1000')\nprint('escaped')", ""),
    "become root": ("import os\nos.setuid(0)\nprint('escaped')", ""),
    "is root": ("import os\nprint('escaped' if 0 in (os.getuid(), os.geteuid()) or 0 in os.getgroups() else '')", ""),
    "set-uid program": (
        "import subprocess\nif 'uid=0' in subprocess.run(['su', '-c', 'id'], capture_output=True, text=True).stdout:\n"
        "    print('escaped')",
        "",
    ),
    "own namespaces": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('escaped')",
        "",
    ),
    "own namespaces by clone": (
        "import ctypes\nif ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) >= 0: print('escaped')",
        "",
    ),
    "own namespaces by a program": (
        "import subprocess\nif subprocess.run(['unshare', '-Ur', 'true'], stderr=-3).returncode == 0: print('escaped')",
        "",
    ),
    "mount": (
        "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('escaped')",
        "",
    ),
    "new root": ("import os\nos.mkdir('/tmp/r')\nos.chroot('/tmp/r')\nprint('escaped')", ""),
    "trace the first process": (
        "import ctypes\nif ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: print('escaped')",
        "",
    ),
    "higher limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))\nprint('escaped')",
        "",
    ),
    "higher priority": ("import os\nos.setpriority(os.PRIO_PROCESS, 0, -5)\nprint('escaped')", ""),
    "kernel keys": ("import ctypes\nif ctypes.CDLL(None).syscall(250, 0, -3, 0) >= 0: print('escaped')", ""),
    "other table of system calls": (
        "import ctypes\nif ctypes.CDLL(None).syscall(0x40000000 + 39) >= 0: print('escaped')",
        "",
    ),
    "host name": ("import socket\nsocket.sethostname('hostile')\nprint('escaped')", ""),
    "clock": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('escaped')", ""),
    # --- output and the verdict ---
    "endless output": ("while True: print('x' * 10_000)", ""),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 10_000)", ""),
    "endless line": ("import os\nwhile True: os.write(1, b'x' * 65536)", ""),
    "bytes that are no text": ("import os\nos.write(1, bytes(range(256)) * 100)", ""),
    "closed output": ("import os, sys\nos.close(1)\nos.close(2)\nwhile True: pass", "longer"),
    "own verdicts": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'ok \\n' * 1000)\n"
        "    except OSError: pass\nwhile True: pass",
        "longer",
    ),
    "exit handler": ("import atexit, time\natexit.register(time.sleep, 600)\nraise SystemExit", ""),
    "deleted builtins": ("import builtins\nfor name in list(vars(builtins)): delattr(builtins, name)", ""),
}
