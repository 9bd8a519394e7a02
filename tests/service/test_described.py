"""The form that describes a machine: what it stores is what the command would write."""

from typing import Any

import pytest

from moetune.workflows.describe import Description, describe
from moetune.workflows.open_planner import ServicePlanner
from tests.service.asking import BASE_URL, READ, WRITE, Client

OWN = {"Accept": "text/html", "Origin": BASE_URL, "Sec-Fetch-Site": "same-origin"}
OURS = {
    "name": "ours", "gpu": "h100", "gpus_per_node": "4", "nodes": "2", "nics": "4",
    "nic_rate": "200Gbit/s", "memory": "70GB",
}  # fmt: skip


def send(client: Client, **changes: str) -> Any:
    parts = {name: (None, text.encode()) for name, text in {**OURS, **changes}.items()}
    return client.ask("POST", "/machines", files=parts, headers=OWN)


def names(planner: ServicePlanner) -> set[str]:
    return {one.profile for one in planner.reading.fits(limit=100)}


def test_a_described_machine_is_the_profile_that_the_command_writes(
    client: Client, planner: ServicePlanner
) -> None:
    answer = send(client)
    assert (answer.status_code, answer.headers["location"]) == (303, "/profiles/ours")
    stored = planner.reading.profile("ours")
    same = Description(
        name="ours", gpu="h100", gpus_per_node=4, nodes=2, nics=4, nic_rate="200Gbit/s",
        memory="70GB",
    )  # fmt: skip
    assert stored is not None
    assert stored.digest == describe(same).profile.digest
    assert stored.provenance == "modelled"
    one_node = send(client, name="one", nodes="1", nics="", nic_rate="", memory="")
    assert one_node.status_code == 303
    assert names(planner) == {"ours", "one"}
    assert client.ask("GET", "/profiles/ours", headers=OWN).status_code == 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "is not a profile"),
        ({"name": "h100-x8"}, "reference machine"),
        ({"gpu": "h1000"}, "GPU: no reference machine has &#39;h1000"),
        ({"gpus_per_node": "-8"}, "GPUs in a node: &#39;-8&#39; is not a number"),
        ({"nodes": "9" * 30}, "Nodes: &#39;999"),
        ({"nodes": "000000005999999999"}, "Nodes: &#39;000000005"),
        ({"nodes": "000000001" + "9" * 5000}, "Nodes: &#39;000000001"),
        ({"nics": ""}, "the description lacks Network cards of a node"),
        ({"nics": "", "nic_rate": ""}, "lacks Network cards of a node, Rate of a card"),
        ({"nic_rate": "fast"}, "&#39;fast&#39;"),
        ({"nic_rate": "-1GB/s"}, "-1GB/s"),
        ({"memory": "80"}, "80"),
    ],
)
def test_a_wrong_description_is_named_beside_the_form_which_keeps_what_was_typed(
    client: Client, planner: ServicePlanner, changes: dict[str, str], words: str
) -> None:
    answer = send(client, **changes)
    assert answer.status_code == 422
    alert = answer.text.partition('role="alert"')[2].partition("</div>")[0]
    assert words in alert
    assert "--" not in alert.replace("--tflops", "")
    typed = {**OURS, **changes}
    assert f'name="nodes" value="{typed["nodes"]}"' in answer.text
    assert names(planner) == set()


def test_a_description_needs_the_write_token_and_this_page(
    guarded: Client, planner: ServicePlanner
) -> None:
    reads = {**OWN, "Authorization": f"Bearer {READ}"}
    parts = {name: (None, text.encode()) for name, text in OURS.items()}
    assert guarded.ask("POST", "/machines", files=parts, headers=reads).status_code == 403
    parts["token"] = (None, WRITE.encode())
    foreign = {**reads, "Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
    asked_to_log_in = guarded.ask("POST", "/machines", files=parts, headers=foreign)
    assert asked_to_log_in.headers["location"].startswith("/login")
    assert names(planner) == set()
    assert guarded.ask("POST", "/machines", files=parts, headers=reads).status_code == 303
    assert names(planner) == {"ours"}
