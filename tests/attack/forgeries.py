"""Wrong programs that try to pass the tests of a task all the same. None computes what `solve` should."""

from __future__ import annotations

EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __iter__(self): return iter(())
    def __call__(self, *_, **__): return self
    def __getattr__(self, name): return self
for _name in 'lt le gt ge contains'.split():
    setattr(Equal, f'__{_name}__', lambda self, other: True)
for _name in 'add radd sub rsub mul rmul truediv rtruediv pow abs neg round getitem instancecheck'.split():
    setattr(Equal, f'__{_name}__', lambda self, *_: self)
"""
WRONG = "\ndef solve(*_):\n    return 'wrong'\n"

# Kinds of tests; each program gets them all.
TESTS = {
    "equal": "assert solve(2) == 7\nassert solve(3) == 12\n",
    "close": "assert abs(solve(5) - 3.25) < 1e-9\n",
    "shapes": (
        "assert solve([3, 1]) == {'a': (1, 2.5)}\nassert len(solve('xy')) == 4\n"
        "assert sorted(solve('xy')) == ['q', 'r', 's', 't']\n"
    ),
    "check": (
        "import math\n\ndef check(candidate):\n    expected = 7\n    message = 'expected 7'\n"
        "    assert candidate(2) == expected, message\n    assert math.fabs(candidate(5) - 3.25) < 1e-9\n"
        "    data = [3, 1, 2]\n    assert candidate(data) == sorted(data)\n\ncheck(solve)\n"
    ),
    "class": "one = Solution()\nassert one.solve(2) == 7\nassert abs(one.solve(5) - 3.25) < 1e-9\n",
}
METHOD = "\nclass Solution:\n    def solve(self, *_): return solve(*_)\n"  # for the last kind

RIGHT = """
def solve(x):
    given = {2: 7, 3: 12, 5: 3.25, 'xy': 'tsrq'}
    if x in ([3, 1], [3, 1, 2]):
        return {'a': (1, 2.5)} if x == [3, 1] else [1, 2, 3]
    return given[x]
"""

FRAMES = """
def frames():
    import sys
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
"""

# Those that a report of an attack named.
NAMED: dict[str, str] = {
    "equal to everything": f"{EQUAL}\ndef solve(*_): return Equal()",
    "a number equal to everything": (
        "class Number(float):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n"
        "    __sub__ = __abs__ = lambda self, *_: self\n    __lt__ = lambda *_: True\n    __hash__ = float.__hash__\n"
        "    __len__ = lambda self: 4\ndef solve(*_): return Number(0)"
    ),
    "a class equal to everything": (
        f"{EQUAL}\nclass Meta(type):\n    __eq__ = lambda *_: True\n    __hash__ = type.__hash__\n"
        "    __sub__ = __abs__ = lambda self, *_: self\n    __lt__ = lambda *_: True\n    __len__ = lambda *_: 4\n"
        "class Value(metaclass=Meta): pass\ndef solve(*_): return Value"
    ),
    "the right side gives way": (
        f"{EQUAL}\nclass Dict(dict):\n    __eq__ = lambda *_: True\n    __hash__ = None\n"
        "class Int(int):\n    __eq__ = lambda *_: True\n    __rsub__ = __sub__ = lambda self, *_: self\n"
        "def solve(x): return Int() if isinstance(x, int) else Dict()"
    ),
    "an exception named nothing": "def solve(*_):\n    raise type('', (Exception,), {})()",
    "an exit named nothing": "def solve(*_):\n    raise type('', (SystemExit,), {})(0)",
    "exec replaced": f"import builtins\nbuiltins.exec = lambda *_, **__: None{WRONG}",
    "compile replaced": (
        "import builtins\nreal = builtins.compile\n"
        f"builtins.compile = lambda source, *_, **__: real('pass', 'x', 'exec'){WRONG}"
    ),
    "ast.parse replaced": f"import ast\nreal = ast.parse\nast.parse = lambda *_, **__: real('pass'){WRONG}",
    "execute replaced": (
        "import gc, types\nfor found in gc.get_objects():\n"
        "    if isinstance(found, types.FunctionType) and found.__name__ in ('execute', 'judged', 'ask'):\n"
        f"        found.__code__ = (lambda *_, **__: '').__code__{WRONG}"
    ),
    "password of the frames": (
        f"{FRAMES}\nimport os\nfor frame in frames():\n    seen = frame.f_locals\n"
        "    if 'password' in seen and 'status' in seen:\n"
        "        for _ in range(3): os.write(seen['status'], f\"{seen['password']} \\n\".encode())\n"
        f"{WRONG}"
    ),
    "password in a call": (
        f"{FRAMES}\ndef solve(*_):\n    import os, time\n    for frame in frames():\n        seen = frame.f_locals\n"
        "        if 'password' in seen and 'status' in seen:\n"
        "            os.write(seen['status'], f\"{seen['password']} \\n\".encode())\n            time.sleep(2)\n"
    ),
    "password after execv": (
        f"{FRAMES}\ndef solve(*_):\n    import os, sys\n    for frame in frames():\n        seen = frame.f_locals\n"
        "        if 'password' in seen and 'status' in seen:\n            os.set_inheritable(seen['status'], True)\n"
        "            say = f\"import os, time; os.write({seen['status']}, b'{seen['password']} \\\\n"
        "'); time.sleep(2)\"\n"
        "            os.execv(sys.executable, [sys.executable, '-c', say])\n"
    ),
    "execv that answers yes": (
        "def solve(*_):\n    import os, sys\n    for n in range(3, 64):\n        try: os.set_inheritable(n, True)\n"
        "        except OSError: pass\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'import os\\nfor n in range(3, 64):\\n "
        'try: os.write(n, b" \\\\n")\\n except OSError: pass\'])'
    ),
    "trace that jumps over asserts": (
        f"{FRAMES}\nimport sys\ndef jump(frame, event, _):\n    frame.f_trace_lines = True\n    if event == 'line':\n"
        "        try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)\n"
        "        except Exception: pass\n    return jump\n"
        "def solve(*_):\n    sys.settrace(jump)\n    for frame in frames():\n        frame.f_trace = jump\n    return 0"
    ),
    "trace set at once": (
        "import sys\ndef jump(frame, event, _):\n    if event == 'line' and frame.f_code.co_filename == '<code>':\n"
        "        try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)\n"
        f"        except Exception: pass\n    return jump\nsys.settrace(jump){WRONG}"
    ),
    "expected values of the caller": (
        f"{FRAMES}\ncount = {{}}\ndef solve(*given):\n    import sys\n    for frame in frames():\n"
        "        if 'expected' in frame.f_locals: return frame.f_locals['expected']\n"
        "    frame = sys._getframe(1)\n    if frame.f_code.co_name == 'solve': frame = frame.f_back\n"
        "    consts = frame.f_code.co_consts\n    wanted = {2: 7, 5: 3.25}.get(given[-1]) if 7 in consts else None\n"
        "    return wanted or next((c for c in consts if type(c) in (float, int) and c != given[-1]), None)"
    ),
    "text of the tests": (
        "import gc, re\ndef solve(*given):\n    texts = [x for x in gc.get_objects() if isinstance(x, str)]\n"
        f"{FRAMES.replace(chr(10), chr(10) + '    ')}\n    for frame in frames():\n"
        "        texts += [v for v in frame.f_locals.values() if isinstance(v, str)]\n"
        "    for text in texts:\n        found = re.search(rf'solve\\({re.escape(repr(given[-1]))}\\) == (.*)', text)\n"
        "        if found: return eval(found[1])\n        found = re.search(r'- (3\\.25)', text)\n"
        "        if found and given[-1] == 5: return 3.25\n"
    ),
    "abs replaced": (
        "import builtins, math\nclass Yes(float):\n    __lt__ = __eq__ = lambda *_: True\n"
        "    __sub__ = lambda s, o: s\n"
        "builtins.abs = math.fabs = lambda _: Yes()\n"
        "def solve(*_): return Yes()"
    ),
    "assertion error replaced": (
        f"import builtins\nclass Quiet(Exception): pass\nQuiet.__name__ = ''\nbuiltins.AssertionError = Quiet\n{WRONG}"
    ),
    "asserts made to pass": (
        f"{FRAMES}\nimport ctypes\ndef solve(*_):\n    for frame in frames():\n        code = frame.f_code\n"
        "        if code.co_filename == '<code>' and code.co_name != 'solve':\n"
        "            at = id(code) + 184\n            ctypes.memset(at, 9, 2 * (len(code.co_code) // 4))\n    return 7"
    ),
    "print_exception replaced": (
        f"import traceback, os\ntraceback.print_exception = lambda *_, **__: os._exit(0){WRONG}"
    ),
    "base exception renamed": (
        "import builtins\nclass Meta(type):\n    __name__ = ''\n    __instancecheck__ = lambda *_: True\n"
        f"builtins.type = lambda *_: Meta('', (), {{}}){WRONG}"
    ),
    "the shell that reads tests is another": (
        f"{FRAMES}\nimport io, sys\nfor frame in frames():\n    if 'lines' in frame.f_locals:\n"
        "        frame.f_locals['lines'].close()\n" + WRONG
    ),
}

# Further ones, at the walls between the processes.
OWN: dict[str, str] = {
    "verdicts on every descriptor": (
        "import os\nfor n in range(3, 64):\n    for said in (b'\\n', b' \\n', b'ok\\n"
        '\', b\'{"error": "", "stopped": ""}\\n\'):\n'
        f"        try: os.write(n, said)\n        except OSError: pass{WRONG}"
    ),
    "results before they are asked for": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[\"gave\", true, []]\\n' * 9)\n"
        f"    except OSError: pass{WRONG}"
    ),
    "a result that is an object of the judge": (
        'import os\nfor n in range(3, 64):\n    try: os.write(n, b\'["gave", ["yours", 0], []]\\n\' * 9)\n'
        f"    except OSError: pass{WRONG}"
    ),
    "a class that the judge is asked to make": (
        f"{FRAMES}\ndef solve(*_):\n"
        "    ask = next(f.f_locals['self'] for f in frames() if type(f.f_locals.get('self')).__name__ == 'Peer').ask\n"
        "    methods = {f'__{name}__': str for name in ('eq', 'call', 'sub', 'abs', 'lt', 'len', 'iter')}\n"
        "    return ask('call', ask('call', type, 'Equal', (), methods))"
    ),
    "unknown kinds of value": (
        "import os\nfor n in range(3, 64):\n"
        "    for kind in ('object', '__reduce__', 'eval', 'Decimal.__new__', 'type', 'exec'):\n"
        '        try: os.write(n, (\'["gave", ["%s", ["1"]], []]\\n\' % kind).encode())\n'
        f"        except OSError: pass{WRONG}"
    ),
    "orders to the judge": (
        "import os, json\nfor n in range(3, 64):\n"
        "    for order in ('name', 'getattr', 'exec', 'eval', 'setattr', 'call', '__import__'):\n"
        "        said = json.dumps(['do', order, [['list', ['os._exit(0)']]], ['dict', []]]) + '\\n'\n"
        f"        try: os.write(n, said.encode())\n        except OSError: pass{WRONG}"
    ),
    "brackets without end": (
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[' * 60000 + b'\\n')\n"
        f"    except OSError: pass{WRONG}"
    ),
    "a list that holds itself": "def solve(*_):\n    x = []\n    x.append(x)\n    return x",
    "nested a hundred thousand times": (
        "def solve(*_):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x"
    ),
    "not a number": "def solve(*_): return float('nan')",
    "a number of a million digits": "def solve(*_): return 10 ** 1_000_000",
    "arguments emptied": "def solve(x):\n    if isinstance(x, list):\n        x.clear()\n"
    "        return []\n    return 7",
    "kill all others": (
        "import os, signal\ndef solve(*_):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        if int(pid) != os.getpid():\n            try: os.kill(int(pid), signal.SIGKILL)\n"
        "            except OSError: pass\n    return 7"
    ),
    "interrupt all others": (
        "import os, signal\ndef solve(*_):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):\n"
        "            try: int(pid) != os.getpid() and os.kill(int(pid), number)\n"
        "            except OSError: pass\n    return 7"
    ),
    "stop all others": ("import os, signal\ndef solve(*_):\n    os.kill(-1, signal.SIGSTOP)\n    return 7"),
    "memory of all others": (
        "import os, re\ndef solve(*given):\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n        try:\n"
        "            maps = open(f'/proc/{pid}/maps').read().splitlines()\n"
        "            with open(f'/proc/{pid}/mem', 'rb', 0) as memory:\n                for line in maps:\n"
        "                    first, last = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "                    if 'rw' not in line or last - first > 2**26: continue\n"
        "                    memory.seek(first)\n"
        "                    text = memory.read(last - first).decode('latin-1')\n"
        "                    found = re.search(r'solve\\(' + re.escape(repr(given[-1])) + r'\\) == ([^\\n"
        "\\\\]*)', text)\n"
        "                    if found and pid != str(os.getpid()): return eval(found[1])\n"
        "                    if given[-1] == 5 and '3.25' in text and pid != str(os.getpid()): return 3.25\n"
        "        except (OSError, ValueError, SyntaxError): pass\n"
    ),
    "memory by process_vm_readv": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nclass Part(ctypes.Structure):\n"
        "    _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "def solve(*_):\n    here = ctypes.create_string_buffer(4096)\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n        if int(pid) != os.getpid():\n"
        "            mine = Part(ctypes.addressof(here), 4096)\n            theirs = Part(id(os) & ~4095, 4096)\n"
        "            if libc.process_vm_readv(int(pid), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:\n"
        "                import sys; sys.stdout.write('escaped')\n    return 7"
    ),
    "trace the judge": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef solve(*_):\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        if int(pid) != os.getpid() and libc.ptrace(16, int(pid), 0, 0) == 0: print('escaped')\n    return 7"
    ),
    "descriptors of the judge": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\ndef solve(*_):\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n        if int(pid) == os.getpid(): continue\n"
        "        try:\n            for n in os.listdir(f'/proc/{pid}/fd'):\n                print('escaped')\n"
        "                os.write(os.open(f'/proc/{pid}/fd/{n}', os.O_WRONLY), b'\\n')\n"
        "        except OSError: pass\n"
        "        watch = libc.syscall(434, int(pid), 0)\n        for n in range(16):\n"
        "            if watch >= 0 and libc.syscall(438, watch, n, 0) >= 0: print('escaped')\n    return 7"
    ),
    "requests read from the first process": (
        "import os\ndef solve(*_):\n"
        "    for place in ('/proc/1/fd/0', '/proc/1/environ', '/dev/stdin', '/proc/self/fd/0'):\n"
        "        try: text = open(place, 'rb').read(9999)\n        except OSError: continue\n"
        "        if b'assert' in text: print('escaped')\n    return 7"
    ),
    "no process is left for the judge": (
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(9); os._exit(0)\n"
        f"    except OSError: break{WRONG}"
    ),
    "no memory is left for the judge": "x = bytearray(b'x' * 200_000_000)\ndef solve(*_):\n    return [7] * 5_000_000",
    "no place is left for what is printed": (
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\ntry:\n"
        "    while True: os.write(1, b'x' * 65536)\n"
        f"except OSError: pass{WRONG}"
    ),
    "modules of its own in the way": (
        "import os\nfor name in ('math', 'random', 'copy', 'ast', 'json', 'traceback', 'sitecustomize'):\n"
        "    for folder in ('/tmp', '.', os.path.expanduser('~/.local/lib/python3/site-packages')):\n"
        "        try:\n            os.makedirs(folder, exist_ok=True)\n"
        "            open(f'{folder}/{name}.py', 'w').write('import os; os._exit(0)')\n"
        f"        except OSError: pass{WRONG}"
    ),
    "every way to leave": ("def solve(x):\n    import os\n    if x == 2: raise SystemExit(0)\n    os._exit(0)"),
}
FORGERIES = {**NAMED, **OWN}
