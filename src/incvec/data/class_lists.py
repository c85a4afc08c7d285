"""Which classes a subset has: public lists by name, or a file of the user's with one name a line.

A subset's classes are numbered in the sorted order of their names, as torchvision's ImageFolder does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from incvec.errors import ConfigError, DataError, nearest


class ClassList(NamedTuple):
    name: str  # as it is told in records
    source: str
    classes: tuple[str, ...]  # sorted


def _listed(name: str, source: str, text: str) -> ClassList:
    return ClassList(name, source, tuple(text.split()))


CLASS_LISTS: Mapping[str, ClassList] = {
    entry.name: entry
    for entry in (
        _listed(
            "imagenet-subset",
            "the usual 100 classes of class-incremental learning: numpy's choice with seed 1993 among the sorted 1,000",
            """
n01514668 n01531178 n01537544 n01689811 n01729322 n01744401 n01774384 n01775062 n01806567 n01882714 n01914609
n01984695 n01990800 n02002556 n02011460 n02033041 n02088094 n02091467 n02094258 n02096177 n02101388 n02102318
n02105056 n02107574 n02107908 n02112137 n02112706 n02115913 n02116738 n02120079 n02123597 n02128385 n02128757
n02168699 n02229544 n02279972 n02280649 n02363005 n02526121 n02536864 n02640242 n02669723 n02749479 n02786058
n02814860 n02840245 n02917067 n02948072 n02950826 n02951585 n02971356 n03000247 n03016953 n03017168 n03075370
n03085013 n03089624 n03109150 n03141823 n03223299 n03250847 n03290653 n03485407 n03527444 n03532672 n03657121
n03691459 n03697007 n03710193 n03759954 n03775071 n03785016 n03884397 n03891332 n03942813 n03967562 n04026417
n04074963 n04152593 n04153751 n04266014 n04355933 n04371430 n04399382 n04409515 n04428191 n04442312 n04525305
n04550184 n04591157 n04599235 n04604644 n07614500 n07831146 n07892512 n09468604 n12267677 n12620546 n12768682
n15075141
""",
        ),
        _listed(
            "cmc",
            "the 100 classes of contrastive multiview coding, https://github.com/HobbitLong/CMC",
            """
n01558993 n01692333 n01729322 n01735189 n01749939 n01773797 n01820546 n01855672 n01978455 n01980166 n01983481
n02009229 n02018207 n02085620 n02086240 n02086910 n02087046 n02089867 n02089973 n02090622 n02091831 n02093428
n02099849 n02100583 n02104029 n02105505 n02106550 n02107142 n02108089 n02109047 n02113799 n02113978 n02114855
n02116738 n02119022 n02123045 n02138441 n02172182 n02231487 n02259212 n02326432 n02396427 n02483362 n02488291
n02701002 n02788148 n02804414 n02859443 n02869837 n02877765 n02974003 n03017168 n03032252 n03062245 n03085013
n03259280 n03379051 n03424325 n03492542 n03494278 n03530642 n03584829 n03594734 n03637318 n03642806 n03764736
n03775546 n03777754 n03785016 n03787032 n03794056 n03837869 n03891251 n03903868 n03930630 n03947888 n04026417
n04067472 n04099969 n04111531 n04127249 n04136333 n04229816 n04238763 n04336792 n04418357 n04429376 n04435653
n04485082 n04493381 n04517823 n04589890 n04592741 n07714571 n07715103 n07753275 n07831146 n07836838 n13037406
n13040303
""",
        ),
        _listed(
            "tiny-imagenet-100",
            "100 of Tiny-ImageNet's 200 classes: numpy's choice with seed 1993 among the sorted names",
            """
n01443537 n01629819 n01641577 n01644900 n01698640 n01768244 n01774384 n01774750 n01784675 n01855672 n01882714
n01944390 n01945685 n01950731 n01984695 n02074367 n02099601 n02099712 n02106662 n02124075 n02132136 n02165456
n02231487 n02236044 n02268443 n02279972 n02403003 n02415577 n02423022 n02480495 n02481823 n02486410 n02504458
n02666196 n02730930 n02788148 n02791270 n02793495 n02802426 n02814533 n02815834 n02892201 n02906734 n02909870
n02963159 n02988304 n02999410 n03042490 n03085013 n03100240 n03179701 n03201208 n03250847 n03255030 n03355925
n03393912 n03400231 n03424325 n03444034 n03544143 n03617480 n03670208 n03733131 n03763968 n03804744 n03854065
n03970156 n03980874 n03983396 n03992509 n04008634 n04074963 n04099969 n04133789 n04179913 n04251144 n04265275
n04285008 n04376876 n04507155 n04532106 n04532670 n04540053 n04560804 n04562935 n04596742 n04597913 n07583066
n07615774 n07695742 n07715103 n07749582 n07753592 n07768694 n07871810 n07873807 n07875152 n09193705 n09332890
n12267677
""",
        ),
    )
}


def find_class_list(name: str | Path) -> ClassList:
    """A list by its name, or the first word of every line of a file; blank lines and # comments are left out."""
    if str(name) in CLASS_LISTS:
        return CLASS_LISTS[str(name)]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{str(name)!r} is neither a class list nor a file.{nearest(str(name), CLASS_LISTS)} Lists: "
            f"{', '.join(CLASS_LISTS)}; a file has one class name a line."
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a list of class names: {error}") from error
    told = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    found = [re.split(r"[\s,]+", line)[0] for line in told]
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise DataError(f"{path} names {', '.join(repeated[:5])} more than once; expected every class once")
    if len(found) < 2:
        raise DataError(f"{path} names {len(found)} class(es); expected two or more, one a line")
    return ClassList(path.name, str(path), tuple(sorted(found)))
