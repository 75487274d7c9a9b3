"""The small world the model knows: word lists and fact tables. Constants only."""

from typing import Final

from training.chat import words


def split_at_bars(text: str) -> tuple[str, ...]:
    """Split a readable list of names that may hold spaces, at each bar."""
    return tuple(text.split("|"))


def _pairs(text: str) -> dict[str, str]:
    """Read `key:value` items separated by commas."""
    return dict(item.strip().split(":") for item in text.split(",") if item.strip())


CAPITALS: Final = _pairs(
    "France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Portugal:Lisbon, Japan:Tokyo,"
    "China:Beijing, India:New Delhi, Egypt:Cairo, Kenya:Nairobi, Peru:Lima, Chile:Santiago,"
    "Cuba:Havana, Norway:Oslo, Sweden:Stockholm, Finland:Helsinki, Poland:Warsaw,"
    "Austria:Vienna, Hungary:Budapest, Greece:Athens, Turkey:Ankara, Iran:Tehran,"
    "Iraq:Baghdad, Russia:Moscow, Canada:Ottawa, Ireland:Dublin, Denmark:Copenhagen,"
    "Belgium:Brussels, Iceland:Reykjavik, Ukraine:Kyiv, Romania:Bucharest, Bulgaria:Sofia,"
    "Serbia:Belgrade, Croatia:Zagreb, Slovenia:Ljubljana, Slovakia:Bratislava,"
    "Estonia:Tallinn, Latvia:Riga, Lithuania:Vilnius, Switzerland:Bern, Mexico:Mexico City,"
    "Brazil:Brasilia, Argentina:Buenos Aires, Colombia:Bogota, Venezuela:Caracas,"
    "Ecuador:Quito, Uruguay:Montevideo, Australia:Canberra, New Zealand:Wellington,"
    "South Korea:Seoul, Vietnam:Hanoi, Thailand:Bangkok, Indonesia:Jakarta,"
    "Philippines:Manila, Malaysia:Kuala Lumpur, Nepal:Kathmandu, Pakistan:Islamabad,"
    "Bangladesh:Dhaka, Afghanistan:Kabul, Saudi Arabia:Riyadh, Jordan:Amman,"
    "Lebanon:Beirut, Syria:Damascus, Morocco:Rabat, Tunisia:Tunis, Algeria:Algiers,"
    "Ghana:Accra, Ethiopia:Addis Ababa, Senegal:Dakar, Czech Republic:Prague,"
    "United Kingdom:London, United States:Washington, Netherlands:Amsterdam, Nigeria:Abuja,"
    "South Africa:Pretoria, North Korea:Pyongyang, Sudan:Khartoum, Scotland:Edinburgh,"
    "Qatar:Doha, Libya:Tripoli"
)

WITH_THE: Final = frozenset({"United Kingdom", "United States", "Philippines", "Czech Republic", "Netherlands"})

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "United States": ("the USA", "the US", "America", "USA"),
    "United Kingdom": ("the UK", "UK", "Great Britain"),
    "Netherlands": ("Holland",),
    "Czech Republic": ("Czechia",),
}
# Real and invented places whose capital the model declines to name.
UNLISTED: Final = split_at_bars(
    "Atlantis|Wakanda|Mongolia|Belarus|Moldova|Armenia|Georgia|Bolivia|Paraguay|Cambodia|Laos|"
    "Mali|Chad|Zambia|Uganda|Rwanda|Malta|Cyprus|Jamaica|Haiti|Fiji|Panama|Texas|California|"
    "Narnia|Mordor|Bavaria|Tibet|Angola|Congo|Honduras|Guatemala|Kazakhstan|Uzbekistan|"
    "Singapore"
)

OPPOSITES: Final = _pairs(
    "hot:cold, big:small, up:down, fast:slow, good:bad, day:night, happy:sad, old:young,"
    "open:closed, light:dark, wet:dry, hard:soft, rich:poor, full:empty, early:late,"
    "loud:quiet, strong:weak, tall:short, left:right, near:far, thick:thin, clean:dirty,"
    "first:last, win:lose, love:hate, push:pull, high:low, inside:outside, black:white,"
    "sweet:sour, heavy:light, new:old, yes:no, true:false, start:stop, buy:sell, warm:cool"
)

SOUNDS: Final = _pairs(
    "cat:meow, dog:woof, cow:moo, duck:quack, sheep:baa, pig:oink, horse:neigh, lion:roar,"
    "mouse:squeak, frog:ribbit, bee:buzz, owl:hoot, snake:hiss, rooster:cock-a-doodle-doo,"
    "crow:caw, goat:maa, wolf:howl, donkey:hee-haw"
)

THING_COLOURS: Final = _pairs(
    "sky:blue, grass:green, snow:white, coal:black, blood:red, banana:yellow, sun:yellow,"
    "sea:blue, carrot:orange, strawberry:red, milk:white, frog:green, lemon:yellow,"
    "chocolate:brown, night:black, tomato:red"
)

HOW_MANY: Final = _pairs(
    "days are in a week:7, months are in a year:12, hours are in a day:24,"
    "minutes are in an hour:60, seconds are in a minute:60, days are in a year:365,"
    "weeks are in a year:52, legs does a spider have:8, legs does a dog have:4,"
    "legs does a bird have:2, legs does an insect have:6, letters are in the alphabet:26,"
    "continents are there:7, planets are in the solar system:8, sides does a triangle have:3,"
    "sides does a square have:4, fingers are on one hand:5, wheels does a car have:4,"
    "wheels does a bicycle have:2, bits are in a byte:8, years are in a century:100"
)

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = words("January February March April May June July August September October November December")

NAMES: Final = words(
    "Tom Anna Ben Lily Max Sara Leo Mia Nora Sam Emma Paul Ruth Oscar Ivy Jack Rosa Omar Lucy"
    " Hugo Ella Noah Zoe Adam Clara Felix Grace Henry Iris James Kate Liam Maria Nina Olga Peter"
    " Quinn Rita Simon Tina Victor Wendy Yara Zack Alice Bob Carla David Eva Frank John Jane Ali"
    " Priya Chen Yuki Ahmed Fatima Lars Ingrid Pedro Sofia"
)
BOT_NAMES: Final = words(
    "Pip Robo Apple Nova Echo Sunny Pixel Jasper Milo Luna Dot Sage Bolt Mint Coco Rusty Star"
    " Kiwi Biscuit Pepper Ziggy Clover Hazel Otto Iggy Berry Cider Maple Ada Max"
)
COLOURS: Final = words("red blue green yellow white black brown pink purple orange grey silver gold teal")
ANIMALS: Final = words(
    "cat dog fox bear frog duck horse mouse rabbit owl lion tiger goat sheep cow pig turtle parrot wolf deer"
)
OBJECTS: Final = words(
    "ball hat kite book cake boat drum lamp key map coin bell box cup coat ring shell lantern basket bike"
)
PLACES: Final = words(
    "park garden forest house river school beach market castle farm lake village hill library cave island"
)
FOODS: Final = words(
    "pizza soup bread cheese rice pasta apples cake honey salad bananas noodles cherries pie pancakes tacos"
)
JOBS: Final = words("teacher doctor farmer baker pilot nurse painter singer writer driver cook gardener sailor")
SPORTS: Final = words("tennis football chess swimming golf running cycling hockey")
CITIES: Final = tuple(CAPITALS.values())

SPELLABLE: Final = tuple(
    dict.fromkeys((*ANIMALS, *OBJECTS, *PLACES, "apple", "house", "water", "tree", "sun", "moon", "cider"))
)

FLYERS: Final = ("bird", "owl", "bee", "eagle", "duck", "parrot", "crow", "bat", "butterfly")
SWIMMERS: Final = ("fish", "duck", "frog", "whale", "shark", "turtle", "dolphin", "penguin")
NON_FLYERS: Final = ("cow", "pig", "dog", "cat", "fish", "horse", "sheep", "frog", "mouse", "whale")
NON_SWIMMERS: Final = ("bee", "butterfly", "owl", "rooster", "parrot", "crow")

DEFINITIONS: Final[dict[str, str]] = {
    "the sun": "The sun is a star. It gives us light and warmth.",
    "the moon": "The moon goes around the Earth and shines at night.",
    "the earth": "The Earth is the planet we live on.",
    "a star": "A star is a very big ball of hot gas in the sky.",
    "rain": "Rain is water that falls from the clouds.",
    "snow": "Snow is frozen water that falls from the clouds in winter.",
    "a river": "A river is a stream of water that flows to the sea.",
    "the sea": "The sea is a very large area of salt water.",
    "water": "Water is a clear liquid that all living things need.",
    "fire": "Fire is hot and bright. It happens when something burns.",
    "a tree": "A tree is a tall plant with a trunk, branches and leaves.",
    "a flower": "A flower is the colourful part of a plant.",
    "a cat": "A cat is a small furry animal that says meow.",
    "a dog": "A dog is a friendly animal that says woof.",
    "a bird": "A bird is an animal with wings and feathers.",
    "a fish": "A fish is an animal that lives in water.",
    "a book": "A book has many pages that you can read.",
    "a house": "A house is a building where people live.",
    "a school": "A school is a place where children learn.",
    "music": "Music is sound that is nice to listen to.",
    "love": "Love is a warm feeling for someone you care about.",
    "time": "Time is what a clock measures, in hours, minutes and seconds.",
    "gravity": "Gravity is the force that pulls things down to the ground.",
    "a computer": "A computer is a machine that follows programs very quickly.",
    "a robot": "A robot is a machine that can do work by itself.",
    "the internet": "The internet connects computers all over the world.",
    "a program": "A program is a list of steps that a computer follows.",
    "python": "Python is a programming language that is easy to read.",
    "json": "JSON is a text format for data, with names and values.",
    "a mac": "A Mac is a computer made by Apple.",
    "a gpu": "A GPU is a chip that does many small calculations at once.",
    "mlx": "MLX is a library for machine learning on Apple computers.",
    "ray": "Ray is a library for running Python on many computers.",
    "grpc": "gRPC is a way for programs to call each other over a network.",
    "a token": "A token is a small piece of text that a language model reads.",
    "an llm": "An LLM is a large language model. It reads text and writes text.",
    "a language model": "A language model is a program that predicts the next piece of text.",
    "machine learning": "Machine learning means that a program learns from examples.",
    "ai": "AI means artificial intelligence: programs that do clever things.",
    "a neural network": "A neural network is a program that learns by changing many numbers.",
    "a kv cache": "A KV cache keeps what a model has already read, so it need not read it again.",
    "a cluster": "A cluster is a group of computers that work together.",
    "cider": "Cider is a drink made from apples.",
    "an apple": "An apple is a round fruit that grows on trees.",
}

CIDERY: Final = "Cidery is an LLM serving cluster for Macs. It lets a group of Macs answer chat requests together."
