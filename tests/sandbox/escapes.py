"""Attempts to leave the sandbox or to outlive it: small programs in a table. A program prints ``ESCAPE`` when one works
and ``held`` when it fails as it must; a program that prints neither proves nothing and fails the test.

``@NAME@`` stands for what :mod:`tests.sandbox.attack` planted outside. ``CALLS`` run one by one, each beside what was
planted; of ``PAIRS`` the second program looks for what the first, of another trajectory, left or is doing.
"""

# ruff: noqa: E501 (programs in a table)

from __future__ import annotations

from typing import NamedTuple

#: Before every program. ``attempt`` takes what must raise OSError; ``call`` a system call by its x86-64 number.
PRELUDE = r"""
import ctypes, errno, glob, os, resource, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def attempt(work, *more):
    try:
        found = work()
    except (OSError, *more) as error:
        print("held", type(error).__name__, error)
    else:
        print("ESCAPE", repr(found)[:300])
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
def denied(number, *arguments):  # by the filter: it says so even where the arguments are wrong
    libc.syscall(number, *arguments)
    print("held" if ctypes.get_errno() in (errno.EPERM, errno.ENOSYS) else "ESCAPE", ctypes.get_errno())
def expect(held, *what):
    print("held" if held else "ESCAPE", *what)
"""


class Call(NamedTuple):
    title: str
    code: str
    timeout_s: float = 10


class Pair(NamedTuple):
    title: str
    first: str
    second: str
    together: bool = False  # the first still runs while the second does
    timeout_s: float = 10


CALLS = (
    # reading
    Call("a private file of the run", "attempt(lambda: open('@FOLDER@/private').read())"),
    Call("a public file of the run", "attempt(lambda: open('@FOLDER@/public').read())"),
    Call("the folder of the run", "attempt(lambda: os.listdir('@FOLDER@'))"),
    Call("the answer in a data set, by a walk over the disk", """
found = [os.path.join(d, f) for d, _, fs in os.walk('/') for f in fs if f.endswith(('.jsonl', '.parquet', '.safetensors'))]
expect(not found, found)"""),
    Call("the password file", "attempt(lambda: open('/etc/shadow').read())"),
    Call("the list of users", "attempt(lambda: open('/etc/passwd').read())"),
    Call("the checkout's source", "attempt(lambda: open('@CHECKOUT@/pyproject.toml').read())"),
    Call("the reward's source", "attempt(lambda: open('@CHECKOUT@/megatron_fr/agents/rewards.py').read())"),
    Call("temporary files of others", "attempt(lambda: os.listdir('/tmp'))"),
    Call("shared memory of others", "expect(os.listdir('/dev/shm') == [], os.listdir('/dev/shm'))"),
    Call("files of the root folder", """
names = {'bin', 'dev', 'lib', 'lib64', 'packages', 'proc', 'sandbox', 'scratch', 'usr'}
extra = set(os.listdir('/')) - names - {sys.base_prefix.split('/')[1]}
expect(not extra, extra)"""),
    Call("the home of the interpreter", """
home = os.path.expanduser('@HOME@')
found = [os.path.join(d, f) for d, _, fs in os.walk(home) for f in fs if not os.path.join(d, f).startswith(sys.base_prefix)]
expect(not found, found[:5])"""),
    Call("hardware and control groups", "attempt(lambda: os.listdir('/sys'))"),
    Call("other processes in /proc", "expect(os.listdir('/proc') == [], os.listdir('/proc'))"),
    Call("the environment of process 1", "attempt(lambda: open('/proc/1/environ').read())"),
    Call("the environment of the run", "attempt(lambda: open('/proc/@PID@/environ').read())"),
    Call("secrets in one's own environment", "expect('SECRET' not in str(os.environ), sorted(os.environ))"),
    Call("secrets in the C library's environment", """
libc.getenv.restype = ctypes.c_char_p
expect(libc.getenv(b'SECRET_KEY_OF_THE_RUN') is None)"""),
    Call("memory of the run through /proc", "attempt(lambda: os.open('/proc/@PID@/mem', os.O_RDWR))"),
    Call("memory of the run by its number", "denied(310, @PID@, 0, 0, 0, 0, 0)"),
    Call("memory of the parent", "denied(310, os.getppid(), 0, 0, 0, 0, 0)"),
    Call("tracing of the parent", "denied(101, 16, os.getppid(), 0, 0)"),
    Call("a descriptor of another process", "denied(438, -1, 0, 0)"),
    Call("an inherited descriptor", """
found = []
for fd in range(3, 1024):
    try: found.append((fd, os.fstat(fd)))
    except OSError: pass
expect(not found, found)"""),
    Call("the session's key ring", "denied(250, 11, @KEY@, 0, 0)"),
    Call("a search in the user's key ring", "denied(250, 10, -4, b'user', b'planted', 0)"),
    Call("a file by its handle", "denied(304, -100, 0, 0)"),
    Call("the host's disk", "attempt(lambda: [os.open(d, os.O_RDONLY) for d in ('/dev/vda', '/dev/sda', '/dev/nvme0n1')])"),
    Call("physical memory", "attempt(lambda: os.open('/dev/mem', os.O_RDONLY))"),
    Call("the kernel's log", "denied(103, 3, 0, 0)"),
    Call("a graphics processor", "expect(not glob.glob('/dev/nvidia*') + glob.glob('/dev/dri*'))"),
    Call("a terminal", "attempt(lambda: open('/dev/tty').read(1))"),
    Call("standard input", "attempt(input, EOFError)"),
    Call("modules of the project", "attempt(lambda: __import__('megatron_fr'), ImportError)"),
    Call("the interpreter's own frames and sockets", """
import gc
frame, names = sys._getframe(), []
while frame:
    names += [n for n, v in frame.f_locals.items() if isinstance(v, socket.socket) and v.fileno() >= 0]
    frame = frame.f_back
expect(not names, names)"""),
    # writing
    Call("a file anyone may write", "attempt(lambda: open('@FOLDER@/writable', 'a'))"),
    Call("the packages of later calls", "attempt(lambda: open('/packages/numpy/__init__.py', 'a'))"),
    Call("the standard library of later calls", "attempt(lambda: open(os.__file__, 'a'))"),
    Call("the sandbox's own programs", "attempt(lambda: open('/sandbox/call.py', 'a'))"),
    Call("the root folder", "attempt(lambda: os.mkdir('/new'))"),
    Call("devices", "attempt(lambda: os.mkdir('/dev/new'))"),
    Call("a device node of one's own", "denied(259, -100, b'disk', 0o60600, 0xfe00)"),
    Call("times and modes outside", "attempt(lambda: os.chmod('/packages/numpy/__init__.py', 0o777))"),
    Call("more than the scratch folder holds", """
def fill():
    for n in range(40): open(f'f{n}', 'wb').write(bytes(16 << 20))
attempt(fill)"""),
    Call("more than /dev/shm holds", """
def fill():
    for n in range(20): open(f'/dev/shm/f{n}', 'wb').write(bytes(16 << 20))
attempt(fill)"""),
    Call("more files than the scratch folder holds", """
def fill():
    for n in range(50_000): os.close(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY))
attempt(fill)""", 30),
    Call("one huge file", "attempt(lambda: open('f', 'wb').truncate(1 << 40))"),
    Call("a core dump", "expect(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))"),
    # leaving
    Call("the network of the host", "attempt(lambda: socket.create_connection(('127.0.0.1', @PORT@), 3))"),
    Call("the network by datagrams", "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@)))"),
    Call("the internet", "attempt(lambda: socket.create_connection(('1.1.1.1', 53), 3))"),
    Call("names", "attempt(lambda: socket.getaddrinfo('example.com', 80))"),
    Call("raw packets", "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))"),
    Call("packet sockets", "attempt(lambda: socket.socket(17, 3))"),
    Call("sockets to the hypervisor", "attempt(lambda: socket.socket(40, 1))"),
    Call("netlink", "attempt(lambda: socket.socket(16, 3))"),
    Call("the kernel's ciphers", "attempt(lambda: socket.socket(38, 5))"),
    Call("a socket file", "attempt(lambda: socket.socket(socket.AF_UNIX).connect('@FOLDER@/socket'))"),
    Call("an abstract socket", "attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@'))"),
    Call("a terminal multiplexer", "attempt(lambda: subprocess.run(['tmux', 'ls']))"),
    Call("programs that change the user", "attempt(lambda: subprocess.run(['su', '-c', 'id']))"),
    Call("user 0", "attempt(lambda: os.setuid(0))"),
    Call("privileges of a program", "expect(libc.prctl(39, 0, 0, 0, 0) == 1)"),
    Call("capabilities", """
header, data = struct.pack('Ii', 0x20080522, 0), ctypes.create_string_buffer(24)
libc.capget(header, data)
expect(data.raw == bytes(24), data.raw)"""),
    Call("a user namespace", "attempt(lambda: os.unshare(os.CLONE_NEWUSER))"),
    Call("a mount namespace by clone", "denied(56, 0x00020000 | 17, 0, 0, 0, 0)"),
    Call("a user namespace by clone3", "denied(435, struct.pack('11Q', 0x10000000, *[0] * 10), 88)"),
    Call("another namespace", "denied(308, 0, 0)"),
    Call("a mount", "denied(165, b'x', b'/scratch', b'tmpfs', 0, 0)"),
    Call("the cover of /proc", "denied(166, b'/proc', 2)"),
    Call("a file system by the new calls", "denied(430, b'tmpfs', 0)"),
    Call("another root", "denied(161, b'/scratch')"),
    Call("io_uring", "denied(425, 8, ctypes.create_string_buffer(256))"),
    Call("programs for the kernel", "denied(321, 0, 0, 0)"),
    Call("performance counters", "denied(298, 0, 0, -1, -1, 0)"),
    Call("faults handled by oneself", "denied(323, 1)"),
    Call("files without a name in memory", "denied(319, b'x', 0)"),
    Call("calls of another architecture", "denied(0x40000000 + 101, 0, 0, 0, 0)"),
    Call("calls that are newer than the filter", "denied(460, 0, 0, 0, 0)"),
    Call("modules of the kernel", "denied(313, 0, b'', 0)"),
    Call("the clock", "attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))"),
    Call("the host's name", "attempt(lambda: socket.sethostname('mine'))"),
    Call("a victim outside", "attempt(lambda: os.kill(@VICTIM@, 9))"),
    Call("the process that started it", """
expect(os.getpid() == 1 and os.getppid() == 0)"""),
    Call("a better priority", "attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))"),
    Call("higher limits", "attempt(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)), ValueError)"),
    # taking
    Call("memory of one process", "attempt(lambda: len(bytearray(2 << 30)), MemoryError)"),
    Call("memory without an owner", "denied(29, 0, 1 << 20, 0o1600)"),
    Call("processes without a number", """
def bomb():
    for _ in range(500):
        if os.fork() == 0: time.sleep(60); os._exit(0)
attempt(bomb)"""),
    Call("threads without a number", """
import threading
def bomb():
    for _ in range(500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
attempt(bomb, RuntimeError)"""),
    Call("descriptors without a number", "attempt(lambda: [os.pipe() for _ in range(1000)])"),
    Call("locked memory", """
page = ctypes.create_string_buffer(1 << 20)
attempt(lambda: call(149, page, 1 << 20))"""),
    Call("message queues", "attempt(lambda: call(240, b'q', 0o102, 0o600, 0))"),
)  # fmt: skip

#: In ``SECURITY.md`` under "Memory of many processes": holds only with a control group.
SUM = Call("memory of many processes together", """
r, w = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(150 << 20); x[::4096] = b'x' * len(x[::4096]); os.write(w, b'1'); time.sleep(3); os._exit(0)
os.close(w)
got = b''
while chunk := os.read(r, 8): got += chunk
expect(len(got) < 8, len(got) * 150, 'MB at once')""", 20)  # fmt: skip

PAIRS = (
    Pair("files of the last call", "open('note', 'w').write('x')", "expect(os.listdir() == [])"),
    Pair("shared memory of the last call", "open('/dev/shm/note', 'w').write('x')", "expect(os.listdir('/dev/shm') == [])"),
    Pair("files of a call that runs", "open('note', 'w').write('x'); time.sleep(2)", "expect(os.listdir() == [])", True),
    Pair("processes of a call that runs", "time.sleep(2)", "expect(os.getpid() == 1 and os.getppid() == 0)", True),
    Pair("a daemon of the last call", """
if os.fork() == 0:
    os.setsid()
    while True: open('/dev/shm/alive', 'a').write('x'); time.sleep(0.05)
""", "time.sleep(0.5); expect(not os.path.exists('/dev/shm/alive'))"),
    Pair("an abstract socket between calls", "s = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen(); time.sleep(2)",
         "attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0meet'))", True),
    Pair("a port between calls", """
try:
    s = socket.create_server(('127.0.0.1', 7777)); time.sleep(2)
except OSError: time.sleep(2)
""", "attempt(lambda: socket.create_connection(('127.0.0.1', 7777), 1))", True),
    Pair("segments of the last call", "print(libc.shmget(0x5EC, 4096, 0o1666))", "attempt(lambda: call(29, 0x5EC, 4096, 0))"),
    Pair("modules that the last call changed", "import numpy; numpy.array = None; sys.modules['os'].listdir = None",
         "import numpy; expect(numpy.array is not None and os.listdir is not None)"),
    Pair("output and code of earlier calls in one's memory", "print('REMNANT' + str(12345 * 6) + 'of-another'); time.sleep(0.1)", r"""
import re
libc.sbrk.restype = ctypes.c_void_p
end, page, hits, seen = libc.sbrk(0), 4096, set(), 0
r, w = os.pipe()
spots = [(end - (24 << 20), end)] + [((id(o) & ~0xFFFFF) - (8 << 20), (id(o) & ~0xFFFFF) + (8 << 20)) for o in (object(), [], {}, 'x' * 600, bytearray(70000))]
for low, high in spots:
    for place in range(low & ~4095, high, page):
        try: n = call(1, w, ctypes.c_void_p(place), ctypes.c_size_t(page))
        except OSError: continue
        data = os.read(r, n); seen += n
        hits |= set(re.findall(rb"REMNANT[0-9]{5}of-anothe[r]|REMNANT' \+ str", data))
expect(not hits and seen > 1 << 20, hits, seen)"""),
    Pair("a forged result of a call that runs", "time.sleep(1); print('genuine')", """
for fd in range(256):
    if fd not in (1, 2):
        try: os.write(fd, b'{"status": 0}')
        except OSError: pass
print('held')""", True),
    Pair("a full scratch folder", """
try:
    for n in range(40): open(f'f{n}', 'wb').write(bytes(16 << 20))
except OSError: pass
time.sleep(2)""", "expect(open('f', 'wb').write(bytes(16 << 20)) == 16 << 20)", True),
    Pair("processes without a number", """
try:
    while True:
        if os.fork() == 0: time.sleep(60)
except OSError: time.sleep(60)
""", "expect(subprocess.run(['echo', 'fine'], capture_output=True).stdout == b'fine\\n')", True, 3),
    Pair("signals to everybody", "time.sleep(1)", "os.kill(-1, 9) if os.fork() else time.sleep(5); print('held')", True),
    Pair("endless output", "while True: os.write(1, b'y' * 65536)", "print('held')", True, 3),
    Pair("sixty busy processes", """
for _ in range(60):
    if os.fork() == 0:
        while True: pass
while True: pass""", "print('held')", True, 3),
)  # fmt: skip
