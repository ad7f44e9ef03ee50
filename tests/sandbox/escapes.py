"""What a program might try in order to get out of the sandbox. Each prints TRIES before it tries, and ESCAPED if it succeeds.

Every escape is bounded, and harms only what the test has made for it: $HOME (a folder with `secret.txt`), the process
$VICTIM (which has the secret in its environment), the servers $TCP, $UDP, $UNIX and $ABSTRACT, and $MARK, a file that a
process writes later. $OWN is the folder that the program is in.
"""

import platform

# Of system calls that libc has no function for: x86-64, 64-bit Arm.
PAIRS = {"ADD_KEY": (248, 217), "BPF": (321, 280), "CLOCK_GETRES": (229, 114), "CLOCK_GETTIME": (228, 113)}
PAIRS |= {"CLOCK_NANOSLEEP": (230, 115), "CLONE3": (435, 435), "IO_URING_SETUP": (425, 425)}
PAIRS |= {"MEMFD_CREATE": (319, 279), "OPENAT2": (437, 437), "PERF_EVENT_OPEN": (298, 241), "PIDFD_GETFD": (438, 438)}
PAIRS |= {"PIDFD_OPEN": (434, 434), "PIDFD_SEND_SIGNAL": (424, 424), "PROCESS_VM_READV": (310, 270)}
PAIRS |= {"RT_SIGQUEUEINFO": (129, 138), "TGKILL": (234, 131), "TRUNCATE": (76, 45), "USERFAULTFD": (323, 282)}
NUMBERS = {name: pair[platform.machine() == "aarch64"] for name, pair in PAIRS.items()}

PRELUDE = """
import ctypes, errno, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
secret = b"the canary sings"
def escaped(truth=True):
    if truth:
        os.write(1, b"ESCAPED")
def called(result):
    if result in (-1, None):
        raise OSError(ctypes.get_errno(), "")
    return result
def call(number, *arguments):
    return called(libc.syscall(number, *arguments))
os.write(1, b"TRIES ")
"""

FILES = {
    "read a file in the home folder": "escaped(open('$HOME/secret.txt', 'rb').read() == secret)",
    "list the home folder": "escaped('secret.txt' in os.listdir('$HOME'))",
    "scan the home folder": "escaped(any(entry.name == 'secret.txt' for entry in os.scandir('$HOME')))",
    "read through ..": "escaped(open('/usr/lib/../../$HOME/secret.txt', 'rb').read() == secret)",
    "read through a symbolic link": "os.symlink('$HOME/secret.txt', '$OWN/link'); escaped(open('$OWN/link', 'rb').read() == secret)",
    "read through a link to a folder": "os.symlink('$HOME', '$OWN/link'); escaped(open('$OWN/link/secret.txt', 'rb').read() == secret)",
    "read through a hard link": "os.link('$HOME/secret.txt', '$OWN/link'); escaped(open('$OWN/link', 'rb').read() == secret)",
    "read through /proc/self/root": "escaped(open('/proc/self/root$HOME/secret.txt', 'rb').read() == secret)",
    "read from a folder that is opened by path only": "at = os.open('$HOME', os.O_PATH); escaped(os.read(os.open('secret.txt', os.O_RDONLY, dir_fd=at), 99) == secret)",
    "read with openat2": "escaped(os.read(call($OPENAT2, -100, b'$HOME/secret.txt', struct.pack('QQQ', 0, 0, 0), ctypes.c_size_t(24)), 99) == secret)",
    "map a file": "escaped(mmap.mmap(os.open('$HOME/secret.txt', os.O_RDONLY), 0, prot=mmap.PROT_READ)[:] == secret)",
    "read by file handle": (
        "handle = struct.pack('Ii', 128, 0) + bytes(128); mount = ctypes.c_int();"
        "handle = ctypes.create_string_buffer(handle, 136);"
        "called(libc.name_to_handle_at(-100, b'$HOME/secret.txt', handle, ctypes.byref(mount), 0));"
        "at = os.open('$HOME', os.O_RDONLY); escaped(os.read(called(libc.open_by_handle_at(at, handle, os.O_RDONLY)), 99) == secret)"
    ),
    "read the list of users": "escaped(b'root' in open('/etc/passwd', 'rb').read())",
    "read the source of Octet": "escaped(b'test' in open('$ROOT/tests/conftest.py', 'rb').read())",
    "read the environment": "escaped(os.environ.get('OCTET_CANARY', '').encode() == secret)",
    "read what is still open": (
        "for one in range(3, 300):\n    try:\n        os.lseek(one, 0, 0); escaped(secret in os.read(one, 99))\n"
        "    except OSError:\n        pass"
    ),
    "write to a file": "open('$HOME/secret.txt', 'w').write(''); escaped()",
    "append to a file": "open('$HOME/secret.txt', 'a').write('x'); escaped()",
    "make a file": "open('$HOME/new', 'w').write('x'); escaped()",
    "make a folder": "os.mkdir('$HOME/new'); escaped()",
    "make a pipe with a name": "os.mkfifo('$HOME/new'); escaped()",
    "make a device": "os.mknod('$HOME/new', 0o600 | stat.S_IFCHR, os.makedev(1, 3)); escaped()",
    "make a link": "os.symlink('secret.txt', '$HOME/new'); escaped()",
    "make a file of a known name in /tmp": "open('$TMP', 'x').write('x'); escaped()",
    "delete a file": "os.unlink('$HOME/secret.txt'); escaped()",
    "delete a folder": "os.rmdir('$HOME/empty'); escaped()",
    "rename a file": "os.rename('$HOME/secret.txt', '$HOME/new'); escaped()",
    "move a file away": "os.rename('$HOME/secret.txt', '$OWN/secret.txt'); escaped()",
    "truncate a file": "call($TRUNCATE, b'$HOME/secret.txt', 0); escaped()",
    "truncate a file while it is opened for reading": "os.open('$HOME/secret.txt', os.O_RDONLY | os.O_TRUNC); escaped()",
    "write through a symbolic link": "os.symlink('$HOME/secret.txt', '$OWN/link'); open('$OWN/link', 'w').write(''); escaped()",
    "change the mode of a file": "os.chmod('$HOME/secret.txt', 0o777); escaped()",
    "change the owner of a file": "os.chown('$HOME/secret.txt', os.getuid(), os.getgid()); escaped()",
    "change the times of a file": "os.utime('$HOME/secret.txt', (0, 0)); escaped()",
    "change an attribute of a file": "os.setxattr('$HOME/secret.txt', 'user.canary', b'x'); escaped()",
    "lock a file": "import fcntl; fcntl.flock(os.open('$HOME/secret.txt', os.O_RDONLY), fcntl.LOCK_EX); escaped()",
    "watch a folder": "at = called(libc.inotify_init()); called(libc.inotify_add_watch(at, b'$HOME', 0xFFF)); escaped()",
}

PROCESSES = {
    "fork": "pid = os.fork()\nif pid: os.waitpid(pid, 0); escaped()",
    "fork forty times": "for _ in range(40):\n    if os.fork() == 0: time.sleep(0.2); os._exit(0)\nescaped()",
    "start a program": "subprocess.run(['/bin/true'], check=True); escaped()",
    "start a program with the shell": "escaped(os.system('exit 0') == 0)",
    "become another program": "os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "start a program with posix_spawn": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0); escaped()",
    "start a process with clone3": (
        "arguments = ctypes.create_string_buffer(struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)\n"
        "pid = call($CLONE3, arguments, ctypes.c_size_t(64))\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0); escaped()"
    ),
    "start a program from memory": (
        "file = call($MEMFD_CREATE, b'x', 0); os.write(file, open('/bin/true', 'rb').read())\n"
        "pid = os.fork()\nif pid == 0: os.execve(file, ['true'], {})\nescaped(os.waitpid(pid, 0)[1] == 0)"
    ),
    "have memory without an address": "file = call($MEMFD_CREATE, b'x', 0); os.ftruncate(file, 1 << 20); escaped()",
    "outlive the program": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for one in (0, 1, 2): os.close(one)\n"
        "        time.sleep(0.3); open('$MARK', 'w').close()\n    os._exit(0)\nos.wait(); escaped()"
    ),
    "leave the process group": "os.setpgid(0, 0); escaped()",
    "start two hundred threads": "for _ in range(200): threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()\nescaped()",
    "kill a process": "os.kill($VICTIM, signal.SIGKILL); escaped()",
    "kill a group of processes": "os.killpg($VICTIM, signal.SIGKILL); escaped()",
    "find out whether a process is there": "os.kill($VICTIM, 0); escaped()",
    "kill a thread": "call($TGKILL, $VICTIM, $VICTIM, 9); escaped()",
    "kill with pidfd_send_signal": "call($PIDFD_SEND_SIGNAL, os.pidfd_open($VICTIM), 9, None, 0); escaped()",
    "kill with rt_sigqueueinfo": "info = struct.pack('iii', 9, 0, -1) + bytes(116); call($RT_SIGQUEUEINFO, $VICTIM, 9, info); escaped()",
    "kill with F_SETOWN": (
        "import fcntl; reading, writing = os.pipe(); fcntl.fcntl(reading, fcntl.F_SETOWN, $VICTIM)\n"
        "fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(writing, b'x'); escaped()"
    ),
    "find a process by its group": "os.getpgid($VICTIM); escaped()",
    "find a process by its session": "os.getsid($VICTIM); escaped()",
    "find a process by its processors": "os.sched_getaffinity($VICTIM); escaped()",
    "read the CPU time of a process": "call($CLOCK_GETTIME, (~$VICTIM << 3) | 2, ctypes.create_string_buffer(16)); escaped()",
    "find a process by its clock": "call($CLOCK_GETRES, (~$VICTIM << 3) | 2, None); escaped()",
    "wait for the CPU time of a process": "call($CLOCK_NANOSLEEP, (~$VICTIM << 3) | 2, 1, struct.pack('qq', 0, 0), None); escaped()",
    "kill the process that started it": "os.kill(os.getppid(), 0); escaped()",
    "trace a process": "called(libc.ptrace(0x4206, $VICTIM, 0, 0)); escaped()",
    "read the memory of a process": (
        "maps = open('/proc/$VICTIM/maps').read(); line = next(one for one in maps.splitlines() if '[stack]' in one)\n"
        "start, end = (int(one, 16) for one in line.split()[0].split('-')); size = end - start\n"
        "buffer = ctypes.create_string_buffer(size); to = struct.pack('QQ', ctypes.addressof(buffer), size)\n"
        "call($PROCESS_VM_READV, $VICTIM, to, ctypes.c_ulong(1), struct.pack('QQ', start, size), ctypes.c_ulong(1), ctypes.c_ulong(0)); escaped(secret in buffer.raw)"
    ),
    "read the memory of a process without its map": (
        "buffer = ctypes.create_string_buffer(8); to = struct.pack('QQ', ctypes.addressof(buffer), 8)\n"
        "try: call($PROCESS_VM_READV, $VICTIM, to, ctypes.c_ulong(1), struct.pack('QQ', 4096, 8), ctypes.c_ulong(1), ctypes.c_ulong(0))\n"
        "except OSError as error: escaped(error.errno == errno.EFAULT)"
    ),
    "read the environment of a process": "escaped(secret in open('/proc/$VICTIM/environ', 'rb').read())",
    "read the command of the process that started it": "escaped(bool(open(f'/proc/{os.getppid()}/cmdline', 'rb').read()))",
    "list the processes": "escaped(any(name.isdigit() for name in os.listdir('/proc')))",
    "open the memory of a process": "open('/proc/$VICTIM/mem', 'rb'); escaped()",
    "take an open file of a process": "call($PIDFD_GETFD, os.pidfd_open($VICTIM), 0, 0); escaped()",
    "change the priority of a process": "os.setpriority(os.PRIO_PROCESS, $VICTIM, 5); escaped()",
    "change the processors of a process": "os.sched_setaffinity($VICTIM, {0}); escaped()",
    "change the scheduling of a process": "os.sched_setscheduler($VICTIM, os.SCHED_BATCH, os.sched_param(0)); escaped()",
    "change the limits of a process": "resource.prlimit($VICTIM, resource.RLIMIT_CORE, (0, 0)); escaped()",
}

NETWORK = {
    "connect by TCP": "socket.create_connection(('127.0.0.1', $TCP), 1); escaped()",
    "listen on TCP": "one = socket.socket(); one.bind(('127.0.0.1', 0)); one.listen(); escaped()",
    "send by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', $UDP)); escaped()",
    "send by UDP on IPv6": "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); escaped()",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect('$UNIX'); escaped()",
    "connect to an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect('\\0$ABSTRACT'); escaped()",
    "ask the kernel by netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped()",
    "listen to the wire": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()",
    "send raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()",
    "talk to the hypervisor": "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); escaped()",
    "use the cryptography of the kernel": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); escaped()",
    "have a pair of sockets": "socket.socketpair(); escaped()",
}

KERNEL = {
    "put a key into the keyring": "call($ADD_KEY, b'user', b'canary', b'x', ctypes.c_size_t(1), -2); escaped()",
    "share memory": "one = called(libc.shmget(0, 4096, 0o1600)); libc.shmctl(one, 0, None); escaped()",
    "have a queue of messages": "one = called(libc.msgget(0, 0o1600)); libc.msgctl(one, 0, None); escaped()",
    "have a semaphore": "one = called(libc.semget(0, 1, 0o1600)); libc.semctl(one, 0, 0); escaped()",
    "have a POSIX queue": "called(libc.mq_open(b'/octet-canary', os.O_CREAT | os.O_RDWR, 0o600, None)); libc.mq_unlink(b'/octet-canary'); escaped()",
    "enter a user namespace": "called(libc.unshare(0x10000000)); escaped()",
    "enter a mount namespace": "called(libc.unshare(0x00020000)); escaped()",
    "enter the namespace of a process": "called(libc.setns(os.pidfd_open($VICTIM), 0x04000000)); escaped()",
    "mount": "called(libc.unshare(0x10020000)); called(libc.mount(b'x', b'$HOME/empty', b'tmpfs', 0, None)); escaped()",
    "change the root": "os.chroot('$HOME'); escaped()",
    "load a program into the kernel": "attributes = struct.pack('IIII', 1, 4, 4, 1) + bytes(56); call($BPF, 0, attributes, 72); escaped()",
    "handle page faults": "call($USERFAULTFD, 1); escaped()",
    "count events": "attributes = struct.pack('IIQ', 1, 128, 1) + bytes(112); call($PERF_EVENT_OPEN, attributes, 0, -1, -1, ctypes.c_ulong(0)); escaped()",
    "use io_uring": "call($IO_URING_SETUP, 2, ctypes.create_string_buffer(120)); escaped()",
    "change the personality": "called(libc.personality(0x0040000)); escaped()",
    "gain rights from a program": "escaped(libc.prctl(39, 0, 0, 0, 0) == 0)",
    "become root": "os.setresuid(0, 0, 0); escaped()",
    "become another user": "os.setresuid(12345, 12345, 12345); escaped()",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_CPU, (500, 600)); escaped(resource.getrlimit(resource.RLIMIT_CPU)[1] > 500)",
    "keep core dumps": "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)); escaped()",
    "read the log of the kernel": "called(libc.klogctl(10, None, 0)); escaped()",
}
if platform.machine() == "x86_64":  # kill($VICTIM, 0) by the table of 32-bit programs, where other numbers are allowed
    KERNEL["make a system call of 32-bit programs"] = (
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('53b825000000bb') + struct.pack('I', $VICTIM) + bytes.fromhex('31c9cd805bc3'))\n"
        "escaped(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() == 0)"
    )

RESOURCES = {
    "take ten gigabytes": "escaped(called(libc.mmap(None, ctypes.c_size_t(10 << 30), 3, 0x4022, -1, ctypes.c_long(0))) not in (None, 2**64 - 1))",
    "take half a gigabyte by a list": "one = bytearray(400 << 20); escaped()",
    "loop": "begin = time.monotonic()\nwhile time.monotonic() - begin < 1.2: pass\nescaped()",
    "sleep": "time.sleep(1.2); escaped()",
    "ignore all signals": (
        "for one in range(1, 65):\n    try: signal.signal(one, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "begin = time.monotonic()\nwhile time.monotonic() - begin < 1.2: pass\nescaped()"
    ),
    "write two megabytes": "for _ in range(32): os.write(1, bytes(1 << 16))\nescaped()",
    "write a file of two megabytes": "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); open('$OWN/large', 'wb').write(bytes(2 << 20)); escaped()",
    "write many files": "for one in range(1500): open(f'$OWN/{one}', 'w').close()\nescaped()",
    "open a hundred files": "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(100)]; escaped()",
    "lock memory": "called(libc.mlock(ctypes.create_string_buffer(1 << 16), ctypes.c_size_t(1 << 16))); escaped()",
}

ESCAPES = FILES | PROCESSES | NETWORK | KERNEL | RESOURCES

# Answers to "write a function add(a, b)" that get a harness to believe in them. Tests hold for none of them.
TESTS = "assert add(2, 2) == 4\nassert add(3, 4) == 7\nassert abs(add(1.5, 1) - 2.5) < 1e-6\n"
EQUAL = (
    "__eq__ = __le__ = __lt__ = lambda self, other: True\n    __sub__ = __rsub__ = __abs__ = lambda self, *other: self"
)
FORGERIES = {
    "end well before the tests": "import sys\nsys.exit(0)",
    "end at once": "import os\nos._exit(0)",
    "end in the call": "import os\ndef add(a, b): os._exit(0)",
    "raise SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "end well at the exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "end well in the hook for errors": "import os, sys\nsys.excepthook = lambda *error: os._exit(0)\ndef add(a, b): return 0",
    "end well on an alarm": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *one: os._exit(0))\ndef add(a, b):\n    signal.alarm(1)\n    signal.pause()",
    "end well in a thread": "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(1)",
    "be equal to everything": f"class Any:\n    {EQUAL}\ndef add(a, b): return Any()",
    "be a number that is equal to everything": f"class Any(int):\n    {EQUAL}\n    __hash__ = int.__hash__\ndef add(a, b): return Any()",
    "patch a builtin": "import builtins\nbuiltins.abs = lambda x: 0\nclass Any(int):\n    __eq__ = __lt__ = lambda self, other: True\n    __sub__ = lambda self, other: self\ndef add(a, b): return Any()",
    "look at the constants of the caller": (
        "import sys\ncalls = []\ndef add(a, b):\n    calls.append(a)\n"
        "    numbers = [one for one in sys._getframe(1).f_code.co_consts if isinstance(one, (int, float))]\n"
        "    return numbers[(1, 3, 6)[len(calls) - 1]]"
    ),
    "look at all objects": (
        "import gc, re\ncalls = []\ndef add(a, b):\n    calls.append(a)\n"
        "    source = next(one['SOURCE'] for one in gc.get_objects() if isinstance(one, dict) and 'SOURCE' in one)\n"
        "    return float(re.findall(r'[-=]+ ([0-9.]+)', source)[len(calls) - 1])"
    ),
    "read the file of the tests": (
        "import re\ncalls = []\ndef add(a, b):\n    calls.append(a)\n    source = open('tests.py').read()\n    return float(re.findall(r'[-=]+ ([0-9.]+)', source)[len(calls) - 1])"
    ),
    "put other tests in their place": "import sys\nsys._getframe(1).f_globals['SOURCE'] = ''\nadd = None",
    "report for the tests": "import os\nfor one in range(3, 1024):\n    try: os.write(one, b'[3, 3, \"\"]')\n    except OSError: pass\nadd = None",
}
