//! What is measured: shell scripts as people type them, and the inputs that they need. Knows no file system.

use crate::common::output;
use anyhow::Context;
use std::path::Path;
use std::process::Command;

/// One thing that is measured. The scripts run in a new directory of a side; `$I` is where the inputs are.
pub struct Row {
    /// Its name in the table.
    pub name: &'static str,
    /// Program that it needs.
    pub needs: &'static str,
    /// Done before, not measured.
    pub setup: &'static str,
    /// Done directly before by a program that is not under `varve run`, not measured.
    pub looked: &'static str,
    /// What is measured.
    pub script: &'static str,
}

const CLONED: &str = "git clone -q \"file://$I/repo.git\" c";
const PLANTED: &str = "tar xf $I/src.tar";

/// All rows.
pub const ROWS: [Row; 21] = [
    Row {
        name: "git clone",
        needs: "git",
        setup: "",
        looked: "",
        script: CLONED,
    },
    Row {
        name: "git status",
        needs: "git",
        setup: CLONED,
        looked: "",
        script: "cd c; git status -s; git status -s",
    },
    Row {
        name: "git checkout",
        needs: "git",
        setup: CLONED,
        looked: "",
        script: "cd c; git checkout -q HEAD~30; git checkout -q -",
    },
    Row {
        name: "git log",
        needs: "git",
        setup: CLONED,
        looked: "",
        script: "cd c; git log --stat -n 100 > /dev/null",
    },
    Row {
        name: "git gc",
        needs: "git",
        setup: CLONED,
        looked: "",
        script: "cd c; git gc -q",
    },
    Row {
        name: "tar x",
        needs: "tar",
        setup: "",
        looked: "",
        script: PLANTED,
    },
    Row {
        name: "tar c",
        needs: "tar",
        setup: PLANTED,
        looked: "",
        script: "tar cf out.tar src",
    },
    Row {
        name: "cp -a",
        needs: "cp",
        setup: PLANTED,
        looked: "",
        script: "cp -a src copy",
    },
    Row {
        name: "rsync -a",
        needs: "rsync",
        setup: "",
        looked: "",
        script: "rsync -a $I/src/ copy/",
    },
    Row {
        name: "find",
        needs: "find",
        setup: PLANTED,
        looked: "",
        script: "find src -type f -size +1k > /dev/null; \
                 find src -name '*.rs' -newer src > /dev/null",
    },
    Row {
        name: "grep -r",
        needs: "grep",
        setup: PLANTED,
        looked: "",
        script: "grep -rl fence src > /dev/null",
    },
    Row {
        name: "rm -r",
        needs: "rm",
        setup: PLANTED,
        looked: "",
        script: "rm -r src",
    },
    Row {
        name: "make",
        needs: "cc",
        setup: "cp -r $I/project .",
        looked: "",
        script: "cd project; make -s -j2",
    },
    Row {
        name: "cargo build",
        needs: "cargo",
        setup: "cp -r $I/crate .",
        looked: "",
        script: "cd crate; CARGO_INCREMENTAL=0 CARGO_TARGET_DIR=target cargo build -q --offline",
    },
    Row {
        name: "compileall",
        needs: "python3",
        setup: "cp -r $I/python .",
        looked: "",
        script: "python3 -m compileall -q python",
    },
    Row {
        name: "pip install",
        needs: "pip",
        setup: "",
        looked: "",
        script: "pip install -q --no-index --no-deps --target t $I/*.whl",
    },
    Row {
        name: "npm ci",
        needs: "npm",
        setup: "cp -r $I/node .",
        looked: "",
        script: "cd node; npm ci --offline --silent --no-audit --no-fund",
    },
    Row {
        name: "200 cat",
        needs: "cat",
        setup: "echo small > f",
        looked: "",
        script: "for i in $(seq 200); do cat f; done > /dev/null",
    },
    Row {
        name: "200 echo >",
        needs: "sh",
        setup: "mkdir d",
        looked: "",
        script: "for i in $(seq 200); do /bin/echo $i > d/$i; done",
    },
    Row {
        name: "sort",
        needs: "sort",
        setup: "cp $I/lines .",
        looked: "",
        script: "sort -S 1M -T . lines -o sorted",
    },
    Row {
        name: "ls; echo >",
        needs: "ls",
        setup: "echo small > f",
        looked: "ls -l . > /dev/null",
        script: "echo more > g",
    },
];

/// A package of Python with fifty modules, as a wheel.
const WHEEL: &str = r#"
import sys, zipfile
with zipfile.ZipFile(sys.argv[1] + "/many-1.0-py3-none-any.whl", "w") as wheel:
    names = ["many/__init__.py"] + ["many/m%d.py" % i for i in range(50)]
    for name in names:
        wheel.writestr(name, "def f(x):\n    return x + 1\n" * 40)
    wheel.writestr("many-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: many\nVersion: 1.0\n")
    text = "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    wheel.writestr("many-1.0.dist-info/WHEEL", text)
    wheel.writestr("many-1.0.dist-info/RECORD", "".join(name + ",,\n" for name in names))
"#;

/// Makes the inputs in `at`, from this project's own sources and by chance.
pub fn prepare(at: &Path) -> anyhow::Result<()> {
    let script = r##"
        git clone -q --bare "$PROJECT" repo.git
        mkdir src && git -C repo.git archive HEAD | tar x -C src && tar cf src.tar src
        mkdir project && cd project
        for i in $(seq 24); do
            echo "#include <stdio.h>
            int f$i(int x) { printf(\"%d\", x); return x * $i; }" > f$i.c
        done
        echo 'int main(void) { return 0; }' > main.c
        echo 'all: p
p: $(patsubst %.c,%.o,$(wildcard *.c))
	$(CC) -o $@ $^' > Makefile
        cd .. && mkdir -p crate/src && cd crate
        printf '[package]\nname = "small"\nversion = "0.1.0"\nedition = "2021"\n[workspace]\n' > Cargo.toml
        for i in $(seq 10); do
            echo "pub fn f() -> usize { $i }" > src/m$i.rs
            echo "pub mod m$i;" >> src/lib.rs
        done
        cd .. && seq 400000 | rev > lines
    "##;
    let mut make = Command::new("sh");
    make.args(["-euc", script])
        .current_dir(at)
        .env("PROJECT", env!("CARGO_MANIFEST_DIR"));
    output(&mut make).context("the inputs cannot be made")?;
    // These programs may be missing; so are their rows then.
    let _ = output(Command::new("python3").args(["-c", WHEEL]).arg(at));
    let python = "mkdir python; \
        cd $(python3 -c 'import json, os; print(os.path.dirname(json.__file__))')/..; \
        cp -r json email http logging unittest $I/python; \
        find $I/python -name __pycache__ -exec rm -r {} +";
    let _ = output(
        Command::new("sh")
            .args(["-c", python])
            .current_dir(at)
            .env("I", at),
    );
    let node = r#"
        mkdir -p dep node && cd dep && echo '{"name": "dep", "version": "1.0.0"}' > package.json
        for i in $(seq 60); do echo 'module.exports = 1;' > m$i.js; done
        npm pack --silent && mv dep-1.0.0.tgz ../node && cd ../node
        echo '{"name": "p", "version": "1.0.0", "dependencies": {"dep": "file:dep-1.0.0.tgz"}}' > package.json
        npm install --offline --silent --no-audit --no-fund && rm -r node_modules
    "#;
    let _ = output(Command::new("sh").args(["-euc", node]).current_dir(at));
    Ok(())
}
