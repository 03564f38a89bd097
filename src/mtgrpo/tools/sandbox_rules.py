"""The system calls that code in a sandbox may make: a program for the kernel's seccomp, in classic BPF."""

import errno
import platform
import socket
import struct

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Name, number on x86_64, number on aarch64. What Python, numpy and ordinary programs need; all others do not exist:
# System V memory, semaphores and queues, keys, namespaces, mounts, tracing, other processes' memory, BPF, io_uring.
ALLOWED = """
read 0 63 write 1 64 open 2 - openat 257 56 close 3 57 close_range 436 436 stat 4 - fstat 5 80 lstat 6 -
newfstatat 262 79 statx 332 291 statfs 137 43 fstatfs 138 44 lseek 8 62 pread64 17 67 pwrite64 18 68 readv 19 65
writev 20 66 preadv 295 69 pwritev 296 70 preadv2 327 286 pwritev2 328 287 access 21 - faccessat 269 48
faccessat2 439 439 getdents 78 - getdents64 217 61 getcwd 79 17 chdir 80 49 fchdir 81 50 rename 82 -
renameat 264 38 renameat2 316 276 mkdir 83 - mkdirat 258 34 rmdir 84 - creat 85 - link 86 - linkat 265 37
unlink 87 - unlinkat 263 35 symlink 88 - symlinkat 266 36 readlink 89 - readlinkat 267 78 chmod 90 -
fchmod 91 52 fchmodat 268 53 chown 92 - fchown 93 55 lchown 94 - fchownat 260 54 umask 95 166 truncate 76 45
ftruncate 77 46 fallocate 285 47 utime 132 - utimes 235 - utimensat 280 88 flock 73 32 fsync 74 82
fdatasync 75 83 sync 162 81 readahead 187 213 fadvise64 221 223 copy_file_range 326 285 sendfile 40 71
splice 275 76 tee 276 77 ioctl 16 29 dup 32 23 dup2 33 - dup3 292 24
mmap 9 222 mprotect 10 226 munmap 11 215 mremap 25 216 brk 12 214 madvise 28 233 mincore 27 232 msync 26 227
membarrier 324 283
poll 7 - ppoll 271 73 select 23 - pselect6 270 72 pipe 22 - pipe2 293 59 epoll_create 213 - epoll_create1 291 20
epoll_ctl 233 21 epoll_wait 232 - epoll_pwait 281 22 epoll_pwait2 441 441 eventfd 284 - eventfd2 290 19
timerfd_create 283 85 timerfd_settime 286 86 timerfd_gettime 287 87 signalfd4 289 74 futex 202 98
futex_waitv 449 449
connect 42 203 accept 43 202 accept4 288 242 bind 49 200 listen 50 201 shutdown 48 210 sendto 44 206
recvfrom 45 207 sendmsg 46 211 recvmsg 47 212 sendmmsg 307 269 recvmmsg 299 243 getsockname 51 204
getpeername 52 205 getsockopt 55 209
fork 57 - vfork 58 - execve 59 221 exit 60 93 exit_group 231 94 wait4 61 260 waitid 247 95 getpid 39 172
getppid 110 173 gettid 186 178 getpgid 121 155 getpgrp 111 - getsid 124 156 setpgid 109 154 setsid 112 157
getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getgroups 115 158 getresuid 118 148
getresgid 120 150 setuid 105 146 setgid 106 144 kill 62 129 tkill 200 130 tgkill 234 131 pidfd_open 434 434
pidfd_send_signal 424 424 prctl 157 167 arch_prctl 158 - set_tid_address 218 96 set_robust_list 273 99
get_robust_list 274 100 rseq 334 293 capget 125 90 getrlimit 97 163 setrlimit 160 164 prlimit64 302 261
getrusage 98 165 getpriority 140 141 setpriority 141 140 sched_yield 24 124 sched_getaffinity 204 123
sched_setaffinity 203 122 sched_getparam 143 121 sched_setparam 142 118 sched_getscheduler 145 120
sched_setscheduler 144 119 sched_get_priority_max 146 125 sched_get_priority_min 147 126 getcpu 309 168
rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136 rt_sigsuspend 130 133
rt_sigtimedwait 128 137 rt_sigqueueinfo 129 138 sigaltstack 131 132 restart_syscall 219 128 pause 34 -
alarm 37 - getitimer 36 102 setitimer 38 103 timer_create 222 107 timer_settime 223 110 timer_gettime 224 108
timer_getoverrun 225 109 timer_delete 226 111
time 201 - times 100 153 gettimeofday 96 169 nanosleep 35 101 clock_gettime 228 113 clock_getres 229 114
clock_nanosleep 230 115
uname 63 160 sysinfo 99 179 getrandom 318 278
"""
LOAD, EQUAL, ANY_BIT, ANSWER = 0x20, 0x15, 0x45, 0x06  # operations
ALLOW, REFUSE, NO_SUCH_CALL, END = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000

# Calls by their numbers: the argument that is looked at, cases (operation, operand, what is answered), and the answer
# otherwise. Sockets are local: nothing is on the network of a sandbox, TCP's memory is hard to count, and AF_VSOCK
# knows no network namespaces. Buffers keep their size, also by force (32, 33). clone3 does not exist, as its flags lie
# in memory: the C library then takes clone.
_LOCAL = (0, [(EQUAL, socket.AF_UNIX, ALLOW)], REFUSE)
_BY_ARGUMENT = {
    (41, 198): _LOCAL,  # socket: the family
    (53, 199): _LOCAL,  # socketpair
    (54, 208): (2, [(EQUAL, option, REFUSE) for option in (7, 8, 32, 33)], ALLOW),  # setsockopt: SO_SNDBUF, SO_RCVBUF
    (72, 25): (1, [(EQUAL, 1031, REFUSE)], ALLOW),  # fcntl: F_SETPIPE_SZ
    (56, 220): (0, [(ANY_BIT, 0x7E020080, REFUSE)], ALLOW),  # clone: new namespaces
}


def system_calls() -> bytes:
    """The program. Raises RuntimeError on other processors than x86_64 and aarch64."""
    if platform.machine() not in ARCHITECTURES:
        raise RuntimeError(f"the processor is {platform.machine()}, not one of {', '.join(ARCHITECTURES)}")
    name, column = ARCHITECTURES[platform.machine()]
    steps = [  # operation, steps to skip if true and if false, operand
        (LOAD, 0, 0, 4),  # the architecture of the call
        (EQUAL, 1, 0, name),
        (ANSWER, 0, 0, END),
        (LOAD, 0, 0, 0),  # the number of the call
    ]
    for number in ALLOWED.split()[1 + column :: 3]:
        if number != "-":
            steps += [(EQUAL, 0, 1, int(number)), (ANSWER, 0, 0, ALLOW)]
    for numbers, (argument, cases, otherwise) in _BY_ARGUMENT.items():
        inner = [(LOAD, 0, 0, 16 + 8 * argument)]  # its lower half, which is all that the kernel reads of these
        for operation, operand, answer in cases:
            inner += [(operation, 0, 1, operand), (ANSWER, 0, 0, answer)]
        inner.append((ANSWER, 0, 0, otherwise))
        steps += [(EQUAL, 0, len(inner), numbers[column]), *inner]
    steps.append((ANSWER, 0, 0, NO_SUCH_CALL))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
