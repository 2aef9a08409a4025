"""Whose series these are: of all that a Prometheus or an exporter reports, those of the engine under test.

What the cluster file says decides; else the address, the model's name and the pod; else, for GPUs, how many there must
be and which of them work. Where that leaves more than one answer, nothing is kept and a sentence says why.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import urlsplit

import orjson
import pandas as pd

from spoc_lib.telemetry import dcgm, gpus
from spoc_lib.telemetry.parse import labels_json

#: Labels of the scrape rather than of what is scraped: a server that two jobs or two Prometheus scrape is one server.
SCRAPE = ("job", "service", "endpoint", "container", "monitor", "prometheus", "prometheus_replica", "replica",
          "__replica__", "receive", "tenant_id", "scrape_job", "exported_job")
#: Labels that place a server: replicas of one service differ in the first.
MEMBER, PLACE = ("instance", "pod"), ("namespace", "cluster", "exported_namespace")
#: Parts of the names of labels in which replicas of one service may differ, too; in all others they agree.
OF_MEMBER = re.compile(r"(?i)pod|node|host|instance|replica|uid|_ip$|^ip|rank|engine|pid|index|hash|zone|worker"
                       r"|container|endpoint|model|prometheus|monitor|receive|tenant|^le$|version|revision")
#: SGLang's ranks of one engine, each of which reports what all of them do.
RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(frozen=True)
class Ours:
    """What is known of the engine under test; empty where nothing is.

    match, gpus, hosts: as in a cluster file; base_url: of its API; models: names under which it serves; gpu_count: GPUs
    of one server; all_gpus: every GPU reported is its own (the twin's exporter).
    """

    match: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[int | str] = ()
    hosts: Sequence[str] = ()
    base_url: str | None = None
    models: Sequence[str] = ()
    gpu_count: int | None = None
    all_gpus: bool = False

    def kept(self, metrics: pd.DataFrame, where: str) -> tuple[pd.DataFrame, list[str]]:
        """(the table with the engine's own series only, each once; sentences). `where`: who reported them.

        The labels of a Prometheus (`job`, `instance`, …) are gone where they tell nothing apart any more: the series
        are then those of the page itself.
        """
        is_gpu = (metrics["source"] == "dcgm").to_numpy()
        servers, said, pods, count = self._servers(metrics[~is_gpu], where)
        boards, more = self._gpus(metrics[is_gpu], where, pods, count)
        parts = [part for part in (servers, boards) if len(part)]
        return pd.concat(parts, ignore_index=True) if parts else metrics.iloc[:0], [*said, *more]

    def _servers(self, rows: pd.DataFrame, where: str) -> tuple[pd.DataFrame, list[str], set[str], int]:
        """(rows of our servers, sentences, their pods, how many they are)."""
        texts = {text: orjson.loads(text) for text in rows["labels"].unique()}
        if not texts:
            return rows, [], set(), 1
        targets = _targets(own for own in texts.values() if self._matched(own))
        if not targets:
            wanted = ", ".join(f"{name}={value}" for name, value in self.match.items())
            return rows.iloc[:0], [f"{where} holds no series with {wanted} (telemetry.match): of the server nothing is "
                                   f"known from there; it holds {_listed(_targets(texts.values()))}"], set(), 1
        chosen, said = self._chosen(targets, where)
        labels: dict[str, str] = {}
        first: dict[tuple, str] = {}  # of the ranks that say the same of one engine
        several = len({_identity(one) for one in chosen}) > 1
        for text, own in sorted(texts.items()):
            target = next((one for one in chosen if _of(own, one) and self._matched(own)), None)
            if target is not None and self._our_model(own, target):
                page = _page_labels(own, several)
                ranks = [name for name in RANKS if name in page]
                engine = (*ranks, labels_json({name: value for name, value in page.items() if name not in ranks}))
                if first.setdefault(engine, labels_json(page)) == labels_json(page):
                    labels[text] = labels_json(page)
        new = rows["labels"].map(labels)
        kept = rows.assign(labels=new)[new.notna().to_numpy()].reset_index(drop=True)
        pods = {one["pod"] for one in chosen if one.get("pod")}
        return kept, said, pods, max(len({_identity(one) for one in chosen}), 1)

    def _matched(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels are those of `match`; a page that was read directly carries none of a Prometheus's."""
        return all(re.fullmatch(pattern, labels.get(name, "")) for name, pattern in self.match.items()) \
            or "instance" not in labels and "job" not in labels

    def _our_model(self, labels: Mapping[str, str], target: Mapping) -> bool:
        """Of several models on one page, ours; a server's only model is ours whatever it is called."""
        name = labels.get("model_name")
        others = len(target["models"]) < 2 or not set(self.models) & target["models"]
        return name is None or others or name in self.models

    def _chosen(self, targets: list[dict], where: str) -> tuple[list[dict], list[str]]:
        names = set(self.models)
        found = targets if self.match else [one for one in targets if self._at_address(one)]
        named = [one for one in targets if names & one["models"]]
        if not found or named and not any(one["models"] for one in found):  # a router's page tells less than engines'
            found = named
            if not found and names and any(one["models"] and "instance" in one for one in targets):
                return [], [f"{where} holds {_listed(targets)}, neither at the engine's address nor with its model: "
                            f"taken for others' (telemetry.match in the cluster file says which are the engine's)"]
            found = found or targets
            places = [{**one["place"], **({} if names else {"models": frozenset(one["models"])})} for one in found]
            if any(place != places[0] for place in places):
                return [], [f"{where} holds several servers' series ({_listed(found)}), and which are the engine's "
                            f"cannot be told: nothing is concluded from them; say it with telemetry.match in the "
                            f"cluster file, for example match: {{instance: '{found[0].get('instance', 'HOST:PORT')}'}}"]
        replicas = {_identity(one) for one in found}
        said = [f"{where} holds {len(replicas)} servers of this model ({_listed(found)}): they are taken for replicas "
                f"of one service and added; telemetry.match in the cluster file chooses among them"] \
            if len(replicas) > 1 and not self.match else []
        mixed = next((one["models"] for one in found if len(one["models"]) > 1 and not names & one["models"]), None)
        if mixed is None:
            return found, said
        return [], [f"{where} holds several models on one page ({', '.join(sorted(mixed))}), and which is meant cannot "
                    f"be told: nothing is concluded from it; name it with engine.served_model or telemetry.match"]

    def _at_address(self, target: Mapping) -> bool:
        """By the address that was scraped, or by the Kubernetes service (`NAME`, `NAME.NAMESPACE…`) that is asked. A
        name of loopback is true on every machine, so the model must be right as well."""
        service, *rest = (urlsplit(self.base_url or "").hostname or "").split(".")
        if service and target.get("service") == service and rest[:1] in ([], [target.get("namespace")]):
            return True
        if not self.base_url or not same_address(self.base_url, str(target.get("instance", ""))):
            return False
        known = set(self.models) and target["models"] and "loopback" in _numbers(urlsplit(self.base_url).hostname or "")
        return not known or bool(set(self.models) & target["models"])

    def _gpus(self, rows: pd.DataFrame, where: str, pods: set[str], servers: int) -> tuple[pd.DataFrame, list[str]]:
        rows = rows.assign(labels=rows["labels"].map(
            {text: labels_json(_gpu_labels(orjson.loads(text))) for text in rows["labels"].unique()}))
        listed = gpus.units(rows)
        if not listed or self.all_gpus:
            return rows, []
        found = list(listed)
        if self.hosts:
            found = [name for name in found if dcgm.host_of(listed[name]) in self.hosts]
        if self.gpus:
            found = [name for name in found if any(_is_gpu(name, listed[name], one) for one in self.gpus)]
            hosts = {dcgm.host_of(listed[name]) for name in found}
            if len(hosts) > 1 and not self.hosts and any(isinstance(one, int) for one in self.gpus):
                return rows.iloc[:0], [f"{where} lists GPU {self.gpus[0]} of {len(hosts)} nodes ({_some(hosts)}): say "
                                       f"with telemetry.hosts which is the engine's; nothing is concluded from them"]
        if self.hosts or self.gpus:
            if not found:
                return rows.iloc[:0], [f"{where} lists none of the GPUs that telemetry.gpus and telemetry.hosts name: "
                                       f"it has {_some(listed)}"]
            return gpus.keep(rows, found), _shared(listed, found)
        return self._found(rows, listed, where, pods, servers)

    def _found(self, rows: pd.DataFrame, listed: dict[str, dict[str, str]], where: str, pods: set[str],
               servers: int) -> tuple[pd.DataFrame, list[str]]:
        """The GPUs of our pods; else those on our node; else those at work, where they are as many as there must be."""
        found = _by_pod(rows, pods)
        if found:
            return gpus.keep(rows, found), _shared(listed, found)
        here = host_names(self.base_url)
        found = [name for name, labels in listed.items() if dcgm.host_of(labels).lower() in here] or list(listed)
        seen = gpus.states(gpus.keep(rows, found))
        active = [name for name, state in seen.items() if state == "active"]
        busy = active or [name for name, state in seen.items() if state == "holds"] or list(seen)
        wanted = None if self.gpu_count is None else self.gpu_count * servers
        places = {dcgm.host_of(listed[name]) for name in busy}
        if wanted is None:
            if len(places) < 2:
                return gpus.keep(rows, busy), _shared(listed, busy)
            doubt = f"GPUs of {len(places)} nodes ({_some(places)}) work"
        elif len(found) <= wanted:
            return gpus.keep(rows, found), _shared(listed, found)
        elif len(busy) <= wanted:
            holding = [name for name, state in seen.items() if state != "idle"]
            mine = holding if len(holding) == wanted else busy
            said = [] if len(mine) == wanted else [
                f"{len(mine)} of {len(found)} GPUs that {where} lists work, and the engine has {wanted}: those that "
                f"work are taken (telemetry.gpus in the cluster file names them)"]
            return gpus.keep(rows, mine), [*said, *_shared(listed, mine)]
        else:
            doubt = f"{len(busy)} of {len(found)} GPUs may be meant, and the engine has {wanted}"
        return rows.iloc[:0], [f"which of the GPUs that {where} lists are the engine's cannot be told ({doubt}): "
                               f"nothing is concluded from them; name them with telemetry.gpus or telemetry.hosts in "
                               f"the cluster file"]


def _targets(labels: Iterable[Mapping[str, str]]) -> list[dict]:
    """What was scraped: the labels of the scrape, the `models` that it names, and its `place`: what all its series say
    that is not a member's own. A server that was scraped twice (two jobs, two Prometheus) stands here once."""
    found: dict[tuple, dict] = {}
    for own in labels:
        scraped = {name: own[name] for name in (*MEMBER, *PLACE, *SCRAPE) if name in own}
        one = found.setdefault(tuple(scraped.items()), {**scraped, "models": set(), "place": dict(own)})
        one["models"] |= {own["model_name"]} if "model_name" in own else set()
        one["place"] = {name: value for name, value in one["place"].items()
                        if own.get(name) == value and not OF_MEMBER.search(name)}
    once: list[dict] = []
    for one in sorted(found.values(), key=lambda one: (not one["models"], "pod" not in one, str(one.get("job")),
                                                      str(one.get("service")))):
        if not any(_same_server(one, other) for other in once):
            once.append(one)
    return once


def _same_server(one: Mapping, other: Mapping) -> bool:
    """Whether two targets are one server, scraped twice: one address, and no label that places it differs. A page
    without an address is one server."""
    return all(one.get(name) == other.get(name) or (name != "instance" and (name not in one or name not in other))
               for name in (*MEMBER, *PLACE)) and one["models"] <= (other["models"] or one["models"])


def _identity(target: Mapping) -> tuple[str, str]:
    return str(target.get("instance", "")), str(target.get("pod", ""))


def _of(labels: Mapping[str, str], target: Mapping) -> bool:
    return all(labels.get(name) == target.get(name) for name in (*MEMBER, *PLACE, *SCRAPE))


def _page_labels(labels: Mapping[str, str], several: bool) -> dict[str, str]:
    """Without what the scrape has added; of several servers, each keeps its address (or pod)."""
    added = set(SCRAPE) | set(PLACE) | {"__name__", "node", "pod", "instance"}
    kept = {name: value for name, value in labels.items() if name not in added}
    if several:
        return {**kept, **{name: labels[name] for name in ("instance", "pod") if name in labels}}
    return kept


def _gpu_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Without the scrape's labels, the exporter's address only where no UUID or host tells the board."""
    drop = {"__name__", "monitor", "job"} | ({"instance"} if labels.get("UUID") and (
        labels.get("hostname") or labels.get("Hostname")) else set())
    return {name: value for name, value in labels.items() if name not in drop}


def _is_gpu(name: str, labels: Mapping[str, str], wanted: int | str) -> bool:
    if isinstance(wanted, int) or wanted.isdecimal():
        return labels.get("gpu") == str(wanted)
    uuid, _, instance = wanted.partition("/")
    whole, given = (text.lower().removeprefix("gpu-") for text in (labels.get("UUID", name), uuid))
    return (whole == given or len(given) >= 8 and whole.startswith(given)) and instance in ("", labels.get("GPU_I_ID"))


def _by_pod(rows: pd.DataFrame, pods: set[str]) -> list[str]:
    """The GPUs that Kubernetes has given to one of the pods, as dcgm-exporter labels them."""
    found = []
    for text in rows["labels"].unique() if pods else ():
        labels = orjson.loads(text)
        if labels.get("exported_pod", labels.get("pod")) in pods:
            found.append(gpus.unit_of(labels))
    return sorted(set(found))


def _shared(listed: Mapping[str, dict[str, str]], found: Sequence[str]) -> list[str]:
    """A sentence where a board has instances of ours and of others: its power and heat are not ours alone."""
    boards = {name.partition(" MIG ")[0] for name in found if " MIG " in name}
    others = [name for name in listed if name.partition(" MIG ")[0] in boards and name not in found]
    return [f"the engine has MIG instances of {_some(boards)}, which others share ({len(others)} more listed): "
            f"power, energy, clocks and temperature are the whole board's"] if others else []


def _listed(targets: Sequence[Mapping]) -> str:
    said = sorted({f"{' and '.join(sorted(one['models'])) or 'a server'} at "
                   f"{one.get('instance') or one.get('pod') or '?'}"
                   + (f" in {one['namespace']}" if one.get("namespace") else "") for one in targets})
    return ", ".join(said[:4]) + (f" and {len(said) - 4} more" if len(said) > 4 else "")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def same_address(url: str, instance: str) -> bool:
    """Whether a Prometheus `instance` (host:port) is where `url` points, by name or by number."""
    parts = urlsplit(url)
    there = urlsplit(instance if "//" in instance else f"//{instance}")
    try:
        ports = parts.port or {"http": 80, "https": 443}.get(parts.scheme), there.port
    except ValueError:
        return False
    if not parts.hostname or not there.hostname or ports[0] != ports[1]:
        return False
    return parts.hostname == there.hostname or bool(_numbers(parts.hostname) & _numbers(there.hostname))


@cache
def _numbers(host: str) -> frozenset[str]:
    """The addresses of a host; all of loopback's are one."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = {host}
    return frozenset("loopback" if _is_loopback(one) else one for one in found)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def host_names(url: str | None) -> set[str]:
    """How an exporter may call the host of `url`: by name, whole and short, or number; of loopback, this host's."""
    host = urlsplit(url).hostname if url else None
    if not host:
        return set()
    numbers = _numbers(host)
    names = {host, *numbers} | ({socket.gethostname()} if "loopback" in numbers else set())
    return {name.lower() for name in names} | {name.lower().split(".")[0] for name in names if not name[0].isdigit()}
