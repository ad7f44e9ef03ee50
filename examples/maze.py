"""A maze in which a chest is hidden: the model goes from room to room until it is there.

octet task play examples/maze.py:build
octet train --preset nano task.name=examples/maze.py:build reward.weights.environment=1

Each turn ends with a number. If a door leads to that room, the model goes there and is told its doors; otherwise the
number is its answer, and ends the search. So does the room of the chest. The reward `correct` is whether the last
number is the room of the chest, which nothing in the conversation names; `environment` is a tenth for each new room.
"""

import random
import re


class Walk:
    """The way of one answer through its maze."""

    def reset(self, problem):
        self.doors, self.chest, self.room = problem.extra["doors"], int(problem.gold), problem.extra["start"]
        self.visited = {self.room}

    def step(self, text):
        said = re.findall(r"#### *(\d{1,4})", text)
        room = int(said[-1]) if said else 0
        if room and room not in self.doors[str(self.room)]:
            return "", True, 0.0
        if not room:
            return f"Write the number of a room after ####. {seen(self.room, self.doors)}", False, 0.0
        worth = 0.0 if room in self.visited else 0.1
        self.visited.add(room)
        self.room = room
        return seen(room, self.doors), room == self.chest, worth


def seen(room, doors):
    return f"Room {room} has doors to {', '.join(map(str, doors[str(room)]))}."


def maze(rng, size):
    """Return the doors of each room of a square: a tree, and two doors more, with which some ways lead back."""
    doors = {room: set() for room in range(1, size * size + 1)}
    across = [(room, room + 1) for room in doors if room % size]
    walls = across + [(room, room + size) for room in doors if room + size in doors]
    rng.shuffle(walls)
    left, area = 2, {room: room for room in doors}  # rooms between which there is a way have the same number
    for one, other in walls:
        left -= area[one] == area[other]
        if area[one] != area[other] or left >= 0:
            joined = area[other]
            area = {room: area[one] if number == joined else number for room, number in area.items()}
            doors[one].add(other)
            doors[other].add(one)
    return {str(room): sorted(others) for room, others in doors.items()}


def way(doors, start, end):
    """Return through how many doors the shortest way leads."""
    reached, steps = {start}, 0
    while end not in reached:
        reached |= {other for room in reached for other in doors[str(room)]}
        steps += 1
    return steps


class Mazes:
    prompt_style = "chat"

    def __init__(self, size, count):
        self.size, self.count = size, count

    def train(self):
        rng, found = random.Random(self.size), []
        for number in range(self.count):
            doors = maze(rng, self.size)
            start, chest = rng.sample(range(1, self.size**2 + 1), 2)
            question = f"Maze {number}: find the chest. {seen(start, doors)} To go there, end with its number: #### 12"
            steps = way(doors, start, chest)
            found.append({"question": question, "answer": chest, "doors": doors, "start": start, "steps": steps})
        return found

    def environment(self, problem):
        return Walk()


def build(settings):
    return Mazes(3, 2000)


def large(settings):
    return Mazes(6, 4000)
