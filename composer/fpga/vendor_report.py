"""Reads the report of Intel's oneAPI compiler on an FPGA design: resources, clock, initiation intervals, latencies.

The compiler writes a folder `<name>.prj/reports`. Its data have one of three equivalent forms: JSON documents, JSON
with one record per line (NDJSON), or JavaScript assignments (`var summaryJSON={...};`). All are parsed as data and
never executed. Intel lists the files in its FPGA handbook ("Access FPGA Optimization Reports in JSON Format") but
guarantees nothing about their content. This reader uses fields that recorded reports of 2021.4, 2023.0 and a later
version contain, and ignores all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from composer.report import ascii_table
from composer.wording import shortened
from pearl.errors import VendorReportError

OLDEST, NEWEST = (2021, 4), (2025, 0)  # supported versions of oneAPI

_DATA_FOLDERS = ("resources/json", "lib/json", "json", "")
_SCRIPT_FOLDERS = ("resources", "lib", "")
_SCRIPTS = {
    "info": "product_data.js",
    "summary": "report_data.js",
    "loop_attr": "report_data.js",
    "quartus": "quartus_data.js",
}
_ASSIGNMENT = re.compile(r"^;?var ([A-Za-z_]+)JSON=", re.MULTILINE)
_COLUMNS = {"ALUTs": "aluts", "FFs": "registers", "RAMs": "ram_blocks", "DSPs": "dsps", "MLABs": "mlabs"}
_FITTED = {"alm": "alms", "alut": "aluts", "reg": "registers", "ram": "ram_blocks", "dsp": "dsps", "mlab": "mlabs"}
_CLOCKS = ("kernel clock", "clock")  # of a whole device image, and of an IP
_FITTER_LINES = {
    "Registers": "registers",
    "Logic utilization": "alms",
    "DSP blocks": "dsps",
    "RAM blocks": "ram_blocks",
}
_FITTER_END = "2x clock fmax"  # the last line that a complete file has
_LARGEST = 1e15  # of any number of a report
_LARGEST_FILE = 1 << 28
_NUMBER = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?|[0-9]{1,15}(\.[0-9]+)?")

_Record: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True)
class VendorResources:
    """Resources of a design or a part; None where the report does not state them.

    The compiler estimates `aluts`, the fitter counts `alms`. An ALM has two ALUTs.
    """

    aluts: float | None = None
    registers: float | None = None
    ram_blocks: float | None = None
    dsps: float | None = None
    mlabs: float | None = None
    alms: float | None = None

    def exceeding(self, available: VendorResources) -> tuple[str, ...]:
        """Every resource of which there are too few in `available`, such as "5,000 DSP blocks of 4,510"."""
        names = (
            ("aluts", "ALUTs"),
            ("registers", "registers"),
            ("ram_blocks", "RAM blocks"),
            ("dsps", "DSP blocks"),
            ("alms", "ALMs"),
        )
        over = []
        for field, words in names:
            need, have = getattr(self, field), getattr(available, field)
            if need is not None and have is not None and need > have:
                over.append(f"{need:,.0f} {words} of {have:,.0f}")
        return tuple(over)


@dataclass(frozen=True)
class BlockReport:
    """A basic block of a kernel, or a loop with the blocks inside it.

    `latency_cycles` is the latency of the block itself, for one pass. `ii` are the cycles from one iteration of a loop
    to the next, None where iterations do not overlap. `trips` is the trip count where the compiler knows it, else 0.
    `fmax_mhz` is the clock for which the block was scheduled.
    """

    name: str
    loop: bool
    ii: int | None
    latency_cycles: float
    trips: int
    fmax_mhz: float
    blocks: tuple[BlockReport, ...] = ()

    def everything(self) -> Iterator[BlockReport]:
        """The block and all blocks inside it, at any depth."""
        yield self
        for block in self.blocks:
            yield from block.everything()


@dataclass(frozen=True)
class KernelReport:
    """One kernel; `blocks` in program order, None where the report has no blocks of any kernel."""

    name: str
    resources: VendorResources
    blocks: tuple[BlockReport, ...] | None = None

    @property
    def loops(self) -> tuple[BlockReport, ...]:
        """Every loop at any depth."""
        return tuple(block for top in self.blocks or () for block in top.everything() if block.loop)

    @property
    def fmax_mhz(self) -> float | None:
        """The slowest clock for which any of its blocks was scheduled."""
        return min((block.fmax_mhz for top in self.blocks or () for block in top.everything()), default=None)


@dataclass(frozen=True)
class VendorReport:
    """A report: `total` is the sum of `kernels` and `others` (interconnect, board interface, pipes).

    `frequency_mhz` is the clock that the fitter achieved after place and route, or else the compiler's estimate: the
    slowest clock for which any block was scheduled. `fitted` are the fitter's resources of the whole device. `missing`
    names in words the parts that the report lacks.
    """

    path: Path
    tool: str
    version: str
    device: str
    kernels: tuple[KernelReport, ...]
    others: tuple[tuple[str, VendorResources], ...]
    total: VendorResources
    available: VendorResources
    frequency_mhz: float | None
    frequency: Literal["achieved", "estimated", "unknown"]
    fitted: VendorResources | None = None
    missing: tuple[str, ...] = ()

    def __rich__(self) -> RenderableType:
        numbers = ("ALUTs", "FFs", "RAMs", "DSPs", "MLABs", "MHz", "II")
        title = Text(f"{self.tool} {self.version.partition(' ')[0]}: {self.device}")
        table = ascii_table(title, ("", *numbers), right=numbers)
        for kernel in self.kernels:
            intervals = ", ".join("-" if loop.ii is None else str(loop.ii) for loop in kernel.loops)
            table.add_row(Text(kernel.name), *_counts(kernel.resources), _shown(kernel.fmax_mhz, 1), intervals or "-")
        table.add_section()
        for name, resources in (*self.others, ("Total", self.total), ("Available", self.available)):
            table.add_row(Text(name), *_counts(resources))
        lines = [f"Clock: {self.frequency_mhz:,.1f} MHz, {self.frequency}"] if self.frequency_mhz is not None else []
        if self.fitted is not None:
            fitted = self.fitted
            alms, registers, rams, dsps = map(_shown, (fitted.alms, fitted.registers, fitted.ram_blocks, fitted.dsps))
            lines.append(f"Fitter, whole device: {alms} ALMs, {registers} FFs, {rams} RAMs, {dsps} DSPs")
        if over := self.total.exceeding(self.available):
            lines.append(f"It does not fit: {', '.join(over)}")
        lines += [f"The report has no {missing}" for missing in self.missing]
        return Group(table, *map(Text, lines))


def _counts(found: VendorResources) -> tuple[str, ...]:
    return tuple(map(_shown, (found.aluts, found.registers, found.ram_blocks, found.dsps, found.mlabs)))


def _shown(value: float | None, decimals: int = 0) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"


def read_vendor_report(path: str | Path) -> VendorReport:
    """Read the report in `path`: a project folder `<name>.prj`, its folder `reports`, or the folder of its data.

    Raises VendorReportError for a report that is absent, truncated, or of a version of oneAPI other than 2021.4 to
    2025.0; the message says where it is, what was expected and what was found.
    """
    path = Path(path)
    try:
        return _read(_Source.find(path))
    except RecursionError as error:
        raise VendorReportError(f"{path} is nested deeper than any report of a compiler.") from error


# --- finding the files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    """One document of a report: its file, and the records in it."""

    path: Path
    records: tuple[_Record, ...]

    def fail(self, expected: str, found: object) -> VendorReportError:
        return VendorReportError(
            f"{self.path}: expected {expected}; found {shortened(repr(found))}. Create the report again with oneAPI "
            f"{_range()}."
        )

    def get(self, record: object, key: str, kind: type[Any] | tuple[type[Any], ...], where: str) -> Any:
        """`record[key]`, which must be of this kind; characters of a text that cannot be printed become "?"."""
        if not isinstance(record, dict):
            raise self.fail(f"an object with {key!r} in {where}", record)
        value = record.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fail(f"{key!r} in {where}", value)
        return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value

    def children(self, record: Mapping[str, Any], where: str) -> list[Any]:
        """The children of a record, which may have none."""
        return self.get(record, "children", list, where) if "children" in record else []

    def number(self, value: object, where: str) -> float:
        """A number, or a text that holds one: reports have both."""
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            value = float(value.replace(",", ""))
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise self.fail(f"a number of at least 0 for {where}", value)
        return float(value)


@dataclass(frozen=True)
class _Source:
    """The folder of a report's data, the form of the data, and the folder of the project."""

    project: Path
    folder: Path
    suffix: str  # .ndjson, .json or .js

    @classmethod
    def find(cls, path: Path) -> _Source:
        root = path.parent if path.is_file() else path
        if not root.is_dir():
            raise VendorReportError(
                f"There is no report in {path}: expected the folder <name>.prj that `icpx -fintelfpga -Xshardware "
                "-fsycl-link=early` writes next to its output (target fpga_report of kernels/sycl/board)."
            )
        for base in (root, root / "reports"):
            for suffix in (".ndjson", ".json"):
                for name in _DATA_FOLDERS:
                    if (base / name / f"summary{suffix}").is_file():
                        return cls(root, base / name, suffix)
            for name in _SCRIPT_FOLDERS:
                if (base / name / _SCRIPTS["summary"]).is_file():
                    return cls(root, base / name, ".js")
        projects = sorted(child.name for child in root.glob("*.prj") if child.is_dir())
        advice = f" Give one of its projects: {', '.join(projects[:8])}." if projects else ""
        raise VendorReportError(
            f"{root} holds no report: expected reports/resources/json/summary.json (or .ndjson; in 2021 "
            f"reports/lib/json/summary.json), or resources/report_data.js.{advice}"
        )

    def document(self, name: str) -> _Document | None:
        """A document of the report, or None where its file does not exist."""
        path = self.folder / (_SCRIPTS[name] if self.suffix == ".js" else f"{name}{self.suffix}")
        if not path.is_file():
            return None
        text = _text_of(path)
        if self.suffix == ".js":
            return _Document(path, (_assigned(path, text, name),))
        if self.suffix == ".json":
            return _Document(path, (_object(path, text, "the document"),))
        records = tuple(
            _object(path, line, f"line {number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()
        )
        if not records:
            raise VendorReportError(f"{path} is empty: expected a JSON object per line. The file is truncated.")
        return _Document(path, records)

    def required(self, name: str) -> _Document:
        found = self.document(name)
        if found is None:
            raise VendorReportError(
                f"{self.folder} holds no {name}{self.suffix}: the report is not complete. Copy the whole folder, or "
                "create the report again."
            )
        return found


def _range() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise VendorReportError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB; no report is that large.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VendorReportError(f"{path} cannot be read: {error}") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _object(path: Path, text: str, where: str, *, whole: bool = True) -> _Record:
    """The JSON object in `text`; where `whole`, nothing may follow it."""
    try:
        found = _DECODER.decode(text) if whole else _DECODER.raw_decode(text)[0]
    except ValueError as error:
        raise VendorReportError(
            f"{path}: {where} is not JSON ({error}). The file is truncated: copy it or create the report again."
        ) from error
    if not isinstance(found, dict):
        raise VendorReportError(f"{path}: expected an object in {where}; found {found!r:.60}.")
    return found


def _assigned(path: Path, text: str, name: str) -> _Record:
    """The object in `var <name>JSON={...};`."""
    start = next((match.end() for match in _ASSIGNMENT.finditer(text) if match[1] == name), None)
    if start is None:
        raise VendorReportError(
            f"{path}: expected a line `var {name}JSON={{...}};`. The file is truncated, or of another version than "
            f"oneAPI {_range()}."
        )
    # JavaScript allows an escaped apostrophe, JSON does not.
    body = re.sub(r"\\(.)", lambda match: "'" if match[1] == "'" else match[0], text[start:], flags=re.DOTALL)
    return _object(path, body, f"{name}JSON", whole=False)


# --- reading the records ---------------------------------------------------------------------------------------------


def _read(source: _Source) -> VendorReport:
    tool, version, device = _compile_info(source.required("info"))
    summary = source.required("summary")
    rows, (_, performance) = _resource_rows(summary), _sections(summary, "performanceSummary")
    kernel_names = [summary.get(row, "name", str, "a row of performanceSummary") for row in performance]
    resources = dict(rows)
    for name in ("Total", "Available"):
        if name not in resources:
            raise summary.fail(f"a row {name!r} in the estimated resources (the file is truncated)", list(resources))
    missing: list[str] = []
    attributes = source.document("loop_attr")
    blocks = None if attributes is None else _kernel_blocks(attributes)
    if attributes is not None and (strangers := [name for name, _ in blocks or () if name not in kernel_names]):
        raise attributes.fail(f"the kernels of the summary ({', '.join(kernel_names)[:200]})", strangers[0])
    if blocks is None:
        missing.append(f"initiation intervals, latencies or estimated clock (loop_attr{source.suffix} is absent)")
    kernels = tuple(_kernels(kernel_names, rows, blocks))
    others = tuple(
        (name, found)
        for name, found in rows
        if name not in kernel_names and name not in ("Total", "Available", "Kernel Subtotal")
    )
    achieved_mhz, fitted = _fitter(source)
    if achieved_mhz is None:
        missing.append("achieved clock (place and route was not run)")
    estimated = [kernel.fmax_mhz for kernel in kernels if kernel.fmax_mhz is not None]
    frequency: Literal["achieved", "estimated", "unknown"]
    frequency = "achieved" if achieved_mhz is not None else "estimated" if estimated else "unknown"
    return VendorReport(
        source.project,
        tool,
        version,
        device,
        kernels,
        others,
        resources["Total"],
        resources["Available"],
        achieved_mhz if achieved_mhz is not None else min(estimated, default=None),
        frequency,
        fitted,
        tuple(missing),
    )


def _compile_info(document: _Document) -> tuple[str, str, str]:
    """Product, version and device; VendorReportError for another product or version."""
    info = document.get(document.records[0], "compileInfo", dict, "the document")
    nodes = document.get(info, "nodes", list, "compileInfo")
    node = nodes[0] if nodes else None
    product, version, device = (
        document.get(node, key, str, "compileInfo.nodes[0]") for key in ("product", "version", "family")
    )
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version)
    if product != "SYCL" or match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        raise VendorReportError(
            f"{document.path}: expected a report of oneAPI {_range()} (product SYCL); found {product} {version[:40]}. "
            "Create the report with one of these versions: later ones have no FPGA support, and other reports differ."
        )
    return "oneAPI", version, device


def _sections(document: _Document, name: str) -> tuple[_Record, list[Any]]:
    """A table of the summary: the record at its head, and its rows."""
    if len(document.records) == 1 and name in document.records[0]:
        section = document.get(document.records[0], name, dict, "the document")
        return section, document.get(section, "children", list, name)
    heads = [record for record in document.records if record.get("summary_type") == name]
    if len(heads) != 1:
        raise document.fail(f"one table {name!r}", len(heads))
    return heads[0], [record for record in document.records if record.get("parent") == name]


def _resource_rows(document: _Document) -> list[tuple[str, VendorResources]]:
    head, rows = _sections(document, "estimatedResources")
    columns = document.get(head, "columns", list, "estimatedResources")
    fields = [_COLUMNS.get(str(column).strip()) for column in columns[1:]]
    if lacking := sorted(set(_COLUMNS.values()) - set(fields)):
        raise document.fail(f"the columns {', '.join(_COLUMNS)} (no {', '.join(lacking)})", columns)
    found = []
    for row in rows:
        name = document.get(row, "name", str, "a row of estimatedResources")
        data = document.get(row, "data", list, f"the row {name!r}")
        if len(data) != len(fields):
            raise document.fail(f"{len(fields)} values in the row {name!r}", data)
        values = {
            field: document.number(value, f"{field} of {name!r}")
            for field, value in zip(fields, data, strict=True)
            if field is not None
        }
        if name == "Available" and not values["mlabs"]:
            del values["mlabs"]  # 2021.4 and 2023.0 print 0 here, though designs use MLABs
        found.append((name, VendorResources(**values)))
    return found


def _kernels(
    names: Sequence[str],
    rows: Sequence[tuple[str, VendorResources]],
    blocks: Sequence[tuple[str, tuple[BlockReport, ...]]] | None,
) -> Iterator[KernelReport]:
    """Each kernel with its resources and blocks; kernels of equal names, as lambdas have, are matched in order."""
    resources = {name: iter([found for row, found in rows if row == name]) for name in names}
    parts = {name: iter([found for kernel, found in blocks or () if kernel == name]) for name in names}
    for name in names:
        found = next(resources[name], VendorResources())
        yield KernelReport(name, found, None if blocks is None else next(parts[name], ()))


def _kernel_blocks(document: _Document) -> list[tuple[str, tuple[BlockReport, ...]]]:
    nodes = document.get(document.records[0], "nodes", list, "loop_attributes")
    if len(document.records) > 1 or any(not isinstance(node, dict) for node in nodes):
        nodes = _linked(document, nodes)
    found = []
    for node in nodes:
        name = document.get(node, "name", str, "a kernel of loop_attributes")
        found.append((name, tuple(_block(document, child) for child in document.children(node, name))))
    return found


def _linked(document: _Document, roots: Sequence[object]) -> list[dict[str, Any]]:
    """The records of a document with the numbers of their children replaced by the children themselves."""
    by_id = {record.get("id"): record for record in document.records[1:] if type(record.get("id")) is int}
    taken: set[int] = set()

    def whole(number: object) -> dict[str, Any]:
        record = by_id.get(number) if type(number) is int else None
        if record is None:
            raise document.fail("a line for each block that is listed (the file is truncated)", number)
        if number in taken:
            raise document.fail("each block listed once", number)
        taken.add(record["id"])
        return {**record, "children": [whole(child) for child in document.children(record, f"block {number}")]}

    return [whole(number) for number in roots]


def _block(document: _Document, node: object) -> BlockReport:
    name = document.get(node, "name", str, "a block of loop_attributes")
    kind = document.get(node, "type", str, name)
    assert isinstance(node, dict)
    latency = document.number(node.get("lt"), f"lt of {name}")
    trips = document.number(node.get("tc", 0), f"tc of {name}")
    interval = re.search(r"[0-9]{1,12}", str(node.get("ii", "")))
    pipelined = node.get("pl") == "Yes" and interval is not None
    return BlockReport(
        name,
        kind == "loop",
        int(interval[0]) if pipelined and interval is not None else None,
        latency,
        int(trips),
        _frequency(document, node.get("af"), f"af, the clock of {name} in MHz"),
        tuple(_block(document, child) for child in document.children(node, name)),
    )


def _fitter(source: _Source) -> tuple[float | None, VendorResources | None]:
    """Clock in MHz and resources of the whole device after place and route; None where it was not run."""
    document = source.document("quartus")
    if document is not None:
        clocks, nodes = (
            document.get(document.get(document.records[0], key, dict, "the document"), "nodes", list, key)
            for key in ("quartusFitClockSummary", "quartusFitResourceUsageSummary")
        )
        clock = next(
            (node.get(key) for node in clocks if isinstance(node, dict) for key in _CLOCKS if key in node), None
        )
        if clock is not None and clock not in ("TBD", "n/a"):
            node = _whole_device(document, nodes)
            values = {field: document.number(node[key], key) for key, field in _FITTED.items() if key in node}
            return _frequency(document, clock), VendorResources(**values)
    folder = source.folder.resolve()
    for parent in (folder, *folder.parents[:3]):
        if (parent / "acl_quartus_report.txt").is_file():
            return _fitter_text(parent / "acl_quartus_report.txt")
        if parent.suffix == ".prj":
            break
    return None, None


def _whole_device(document: _Document, nodes: Sequence[Any]) -> _Record:
    records = [node for node in nodes if isinstance(node, dict)]
    for kind in ("aclsystem", "system"):
        if found := [record for record in records if record.get("type") == kind]:
            return found[0]
    raise document.fail("the fitter's resources of the whole device (type aclsystem or system)", nodes)


def _frequency(document: _Document, value: object, where: str = "the achieved clock in MHz") -> float:
    found = document.number(value, where)
    if not found:
        raise document.fail(f"a number above 0 for {where}", value)
    return found


def _fitter_text(path: Path) -> tuple[float, VendorResources]:
    """Read `acl_quartus_report.txt`, with lines such as "DSP blocks: 1 / 1,518 ( < 1 % )"."""
    text = _text_of(path)
    document = _Document(path, ())
    complete = text[: text.rfind("\n") + 1].splitlines()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in complete)}
    values = {}
    for name, field in _FITTER_LINES.items():
        words = found.get(name, "").split()
        values[field] = document.number(words[0] if words else None, f"the line {name!r}")
    if _FITTER_END not in found:
        raise document.fail(f"a line {_FITTER_END!r} at its end (the file is truncated)", text[-30:])
    return _frequency(document, found.get("Actual clock freq")), VendorResources(**values)
