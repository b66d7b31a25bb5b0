"""The C core, the one part of the package that pyproject.toml cannot describe.

One extension for the stable ABI of CPython 3.11, so one wheel serves every later CPython and every
torch. From the environment:

    SHMBUFFER_WERROR=1                       every warning of the compiler is an error
    SHMBUFFER_SANITIZE=address,undefined     compiled with these sanitizers, for scripts/sanitize
    SHMBUFFER_COVERAGE=1                     compiled to count branches, for scripts/coverage
"""

import os
import subprocess
import sysconfig
from glob import glob
from multiprocessing.pool import ThreadPool

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# One fixed order of summation on every vector path: without -ffp-contract=off the compiler may fuse
# a product into a sum on one path and not on another, and results would differ in their last bits.
# -fno-trapping-math: nobody looks at floating-point exceptions, and where they count a loop with a
# comparison of numbers in it is not done several at a time.
COMPILE = [
    "-std=gnu11",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-pthread",
]
LINK = ["-pthread"]

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wformat=2",
    "-Wpointer-arith",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wvla",
    "-Wno-unused-parameter",  # CPython calls every method with a self
]

# Python hands down its own -fwrapv and -DNDEBUG, which would hide overflows from the sanitizer and
# take out the asserts.
SANITIZED = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-fno-wrapv",
    "-UNDEBUG",
]

if os.environ.get("SHMBUFFER_WERROR") == "1":
    COMPILE += WARNINGS
if sanitizers := os.environ.get("SHMBUFFER_SANITIZE"):
    COMPILE += [f"-fsanitize={sanitizers}", *SANITIZED]
    LINK += [f"-fsanitize={sanitizers}"]
if os.environ.get("SHMBUFFER_COVERAGE") == "1":
    # Many processes write the same counters; without optimisation a branch is one of the source.
    COMPILE += ["--coverage", "-O0", "-fprofile-update=atomic", "-UNDEBUG"]
    LINK += ["--coverage"]


class BuildCore(build_ext):
    """Compiles always, and stops with one sentence where there is nothing to compile with."""

    def finalize_options(self) -> None:
        """Take no earlier build for granted."""
        super().finalize_options()
        # A core that is newer than its sources may still have been compiled with other flags.
        self.force = True

    def copy_file(self, infile: str, outfile: str, *args: object, **kwargs: object) -> object:
        """Copy to a new file: a process that runs with the core before it keeps that one."""
        if os.path.isfile(outfile):
            os.unlink(outfile)
        return super().copy_file(infile, outfile, *args, **kwargs)

    def build_extensions(self) -> None:
        """Compile the core, or say what is missing."""
        compiler = self.compiler.compiler_so[0]
        if not can_run(compiler):
            missing = f"{compiler!r} cannot be run"
        elif not any(os.path.exists(os.path.join(d, "Python.h")) for d in self.include_dirs):
            missing = f"there is no Python.h in {sysconfig.get_path('include')}"
        else:
            compile_some = self.compiler.compile

            def compile_all(sources: list[str], **options: object) -> list[str]:
                """Compile the files side by side; the objects, in order."""
                with ThreadPool() as pool:
                    each = pool.map(lambda source: compile_some([source], **options), sources)
                return [made for some in each for made in some]

            self.compiler.compile = compile_all
            super().build_extensions()
            return
        raise SystemExit(
            "shmbuffer needs a C compiler and the headers of Python to build its core, "
            f"and {missing}: install both "
            "(Debian, Ubuntu: apt install build-essential python3-dev), then try again."
        )


def can_run(compiler: str) -> bool:
    """Whether a program of this name starts and answers."""
    try:
        subprocess.run([compiler, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


setup(
    ext_modules=[
        Extension(
            "shmbuffer._native._core",
            sources=sorted(glob("shmbuffer/_native/*/*.c")),
            depends=sorted(glob("shmbuffer/_native/*/*.h")),
            include_dirs=["shmbuffer/_native"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=COMPILE,
            extra_link_args=LINK,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
