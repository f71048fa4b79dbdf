#include "eval/document_words.h"

namespace omnikv::prose {
namespace {

using SV = std::string_view;

// ---- for a chapter ----

constexpr SV kTowns[] = {
    "Ashby Vale",   "Little Marrow", "Stonebeck",    "Hartwell",      "Fenny Cross",
    "Withy Bridge", "Cold Ashford",  "Brackenford",  "Long Sutter",   "Tansy Green",
    "Marl Hill",    "Applewick",     "Dunmore Fold", "Kettlesby",     "Harrow Lea",
    "Wren's Hatch", "Pennyfield",    "Thornaby",     "Elmstead",      "Roke End",
    "Brindle Ford", "Mossy Weir",    "Netherby",     "Up Hallow",     "Linden Bank",
    "Foxcote",      "Merrow Bay",    "Barley Combe", "Quarry Hollow", "Saltmarsh",
};
constexpr SV kRivers[] = {
    "the Wend", "the Tarrow", "the Lathe",  "the Sallow", "the Brede", "the Marl",
    "the Ivel", "the Corran", "the Teasel", "the Ottery", "the Rill",  "the Hamble",
};
constexpr SV kWoods[] = {
    "Crow Wood",      "Hanging Wood", "the Abbot's Wood", "Withen Copse", "the Nine Oaks",
    "Badger Spinney", "Hollin Wood",  "the King's Chase", "Nut Wood",     "Maiden Copse",
};
constexpr SV kElders[] = {
    "Widow Penny",      "Farmer Holt",  "Captain Brand",    "Parson Lisle",   "Squire Penfold",
    "Goodman Thorne",   "Dame Orchard", "Grandfather Hask", "Uncle Amery",    "Aunt Drusilla",
    "Mistress Garland", "Father Quill", "Widow Larkin",     "Old Tobit",      "Farmer Stubbs",
    "Captain Merrow",   "Mother Hazel", "Squire Bellamy",   "Goody Fletcher", "Uncle Rafe",
};
constexpr SV kTrades[] = {
    "clockmaker",    "weaver",        "cooper",      "miller",       "thatcher",    "blacksmith",
    "potter",        "bookbinder",    "saddler",     "candle maker", "wool comber", "broom maker",
    "wheelwright",   "cobbler",       "glazier",     "stonemason",   "tinker",      "basket maker",
    "harness maker", "dyer",          "printer",     "rope maker",   "mapmaker",    "boat builder",
    "cabinet maker", "lantern maker", "glove maker", "tile maker",   "net mender",  "bell founder",
};
constexpr SV kBeasts[] = {
    "grey donkey",  "brown mare",    "spotted dog",    "lame goose",
    "black cat",    "white pony",    "shaggy goat",    "old sheepdog",
    "speckled hen", "young bullock", "tame jackdaw",   "blind mule",
    "yellow puppy", "fat gander",    "lean tabby cat", "thin greyhound",
};
constexpr SV kSeasons[] = {"spring", "summer", "autumn", "winter"};

// ---- for a paragraph ----

constexpr SV kThings[] = {
    "clock",         "kettle",       "cart",        "pump",    "spinning wheel", "loom",
    "church organ",  "weather vane", "garden gate", "ladder",  "music box",      "stove",
    "lantern",       "saddle",       "boat",        "bellows", "well rope",      "mill wheel",
    "rocking chair", "cupboard",     "plough",      "fiddle",  "birdcage",       "barrow",
    "butter churn",  "brass lamp",   "sundial",     "sledge",  "writing desk",   "cradle",
};
constexpr SV kParts[] = {
    "spring", "hinge", "axle", "handle", "chain",   "rivet",   "board", "peg",
    "strap",  "spoke", "lid",  "hook",   "spindle", "bracket", "screw", "crossbar",
};
constexpr SV kTools[] = {
    "hammer", "file",   "chisel", "brace", "awl",  "saw",   "plane",       "mallet",
    "needle", "trowel", "knife",  "spade", "rasp", "clamp", "small brush", "crowbar",
};
constexpr SV kGoods[] = {
    "honey",      "wool",           "candles",     "onions", "salt fish", "cheese",
    "ribbons",    "goose feathers", "earthenware", "nails",  "lamp oil",  "apples",
    "barley",     "seed potatoes",  "linen",       "rope",   "walnuts",   "butter",
    "tin plates", "brooms",         "eggs",        "tallow", "hides",     "dried herbs",
    "soap",       "willow baskets", "mustard",     "oats",
};
constexpr SV kDishes[] = {
    "bread and cheese",
    "a pot of barley broth",
    "cold bacon with mustard",
    "an apple pudding",
    "a plate of boiled eggs",
    "a mutton pie",
    "pea soup",
    "an oat cake with honey",
    "a pan of fried trout",
    "a bowl of stewed plums",
    "a dish of potatoes",
    "a seed cake",
    "hot milk and toast",
    "a rabbit stew",
    "a dish of buttered parsnips",
    "gingerbread",
    "bean soup with bacon",
    "a loaf still warm from the oven",
    "cold ham with pickled onions",
    "a dish of baked pears",
    "a pan of mushrooms",
};
constexpr SV kPlants[] = {
    "beans",      "roses",           "cabbages",        "marigolds",
    "leeks",      "hollyhocks",      "lettuces",        "strawberries",
    "carrots",    "sweet peas",      "currant bushes",  "young pear trees",
    "turnips",    "lavender bushes", "tulips",          "cucumbers",
    "radishes",   "gooseberries",    "raspberry canes", "lilies",
    "onion sets", "wallflowers",     "marrows",         "asters",
};
constexpr SV kBirds[] = {
    "thrush", "robin", "heron",     "rook",   "wren", "starling",   "barn owl", "swallow",
    "magpie", "finch", "blackbird", "cuckoo", "lark", "kingfisher", "jay",      "curlew",
};
constexpr SV kTrees[] = {
    "elm", "oak",      "ash",    "beech",       "willow", "alder", "chestnut",
    "yew", "hawthorn", "poplar", "walnut tree", "rowan",  "birch", "crab apple",
};
constexpr SV kPlaces[] = {
    "the corn hall",  "the schoolhouse", "the toll house",   "the chapel on the hill",
    "the bakehouse",  "the boat shed",   "the post house",   "the reading room",
    "the old barn",   "the mill",        "the market cross", "the stone bridge",
    "the forge",      "the dairy",       "the sheep pens",   "the churchyard",
    "the lower quay", "the tannery",     "the brick kiln",   "the ferry landing",
};
constexpr SV kInns[] = {
    "the Plough",    "the Three Herons",     "the Green Man",  "the Drover's Rest",
    "the Blue Bell", "the Ship and Lantern", "the Wheatsheaf", "the Old Swan",
    "the Packhorse", "the Bay Tree",
};
constexpr SV kKin[] = {
    "sister", "brother", "uncle",  "aunt",      "cousin", "grandmother",
    "nephew", "niece",   "father", "godmother", "mother", "grandfather",
};
constexpr SV kStrangers[] = {
    "pedlar",
    "soldier on leave",
    "surveyor",
    "young painter",
    "drover",
    "fiddler",
    "preacher",
    "map seller",
    "hop picker",
    "retired sailor",
    "stone cutter",
    "tall boy with a bundle",
    "gentleman in a grey coat",
    "knife grinder",
    "puppet player",
    "horse dealer",
    "student of plants",
    "bearded monk",
};
constexpr SV kClothes[] = {
    "shawl",          "straw hat",   "patched coat",  "leather apron",    "woollen cap",
    "waistcoat",      "cloak",       "Sunday jacket", "knitted scarf",    "oilskin cape",
    "pair of gloves", "feather hat", "lace collar",   "sheepskin jacket", "flannel shirt",
};
constexpr SV kColours[] = {
    "blue", "brown", "grey", "dark green", "yellow", "scarlet", "white", "russet", "black",
};
constexpr SV kEvents[] = {
    "the great flood",
    "the coming of the canal",
    "the long drought",
    "the old queen's visit",
    "the last cattle fair",
    "the building of the bridge",
    "the hard winter",
    "the dry summer",
    "the fall of the church tower",
    "the double harvest",
    "the storm that took the roofs",
    "the quarrel over the common",
};
constexpr SV kOffices[] = {
    "mayor",     "parish clerk", "bailiff",     "schoolmaster", "postmaster",
    "constable", "sexton",       "toll keeper", "innkeeper",    "magistrate",
};
constexpr SV kFeasts[] = {
    "the harvest supper",
    "the spring fair",
    "the miller's wedding",
    "midsummer eve",
    "the blessing of the boats",
    "the feast of lanterns",
    "the apple fair",
    "the sheep shearing",
    "the ringers' supper",
    "the christening at the farm",
    "the opening of the new bridge",
};
constexpr SV kTunes[] = {
    "fiddle", "flute", "drum", "concertina", "pipe", "harp", "horn", "dulcimer", "tambourine",
};
constexpr SV kFinds[] = {
    "silver thimble",     "brass button", "folded map",    "child's shoe",      "bone comb",
    "pair of spectacles", "carved box",   "leather purse", "tin whistle",       "garnet ring",
    "prayer book",        "clay pipe",    "glass bead",    "bundle of letters", "pocket watch",
};
constexpr SV kAilments[] = {
    "cough",      "fever",       "sprained ankle", "bad tooth",    "stiff back",
    "burnt hand", "sore throat", "heavy cold",     "broken wrist", "headache",
};
constexpr SV kLessons[] = {
    "sums",
    "spelling",
    "the names of the stars",
    "the kings and queens",
    "long division",
    "the capes and bays",
    "fair handwriting",
    "the parts of a flower",
    "the old ballads",
    "the weights and measures",
};

// ---- for a sentence ----

constexpr SV kSkies[] = {
    "grey and still",
    "clear and cold",
    "soft with mist",
    "bright after rain",
    "pale as milk",
    "red in the east",
    "dull and heavy",
    "fresh and windy",
    "warm and hazy",
    "wet and blustery",
    "calm and silver",
    "damp and quiet",
    "golden",
    "dark with cloud",
    "as clean as a washed plate",
};
constexpr SV kSounds[] = {
    "the noise of carts",   "a barking dog",
    "the church bell",      "the ring of a hammer",
    "the cry of gulls",     "a cock on the wall",
    "somebody whistling",   "the laughter of children",
    "rain on the tiles",    "the creak of a gate",
    "a milkmaid's song",    "the rattle of pails",
    "the honking of geese", "the wind in the chimney",
    "the post horn",        "the tap of a stick",
    "a slow drum",          "the splash of oars",
};
constexpr SV kSmells[] = {
    "fresh bread", "wet earth", "wood smoke",     "cut hay",    "tar and rope", "baked apples",
    "old leather", "lamp oil",  "boiled cabbage", "new paint",  "warm wool",    "lavender",
    "sawdust",     "hot iron",  "wild mint",      "candle wax", "malt",         "the river",
};
constexpr SV kMoods[] = {
    "cheerful", "tired",     "thoughtful", "stubborn", "patient",  "anxious",
    "merry",    "gruff",     "silent",     "hopeful",  "restless", "sleepy",
    "proud",    "contented", "gloomy",     "shy",      "brisk",    "polite",
};
constexpr SV kAdverbs[] = {
    "slowly",
    "quietly",
    "carefully",
    "gladly",
    "at once",
    "with great care",
    "without a word",
    "in no hurry",
    "briskly",
    "patiently",
    "half asleep",
    "with a light heart",
    "with some trouble",
    "without any fuss",
    "a little sadly",
    "as well as might be",
    "solemnly",
};
constexpr SV kAdjectives[] = {
    "old",      "small",  "heavy",   "crooked", "painted", "handsome", "plain",
    "battered", "narrow", "curious", "faded",   "sturdy",  "rough",    "odd",
    "tall",     "dusty",  "neat",    "worn",    "clumsy",
};
constexpr SV kTimes[] = {
    "towards evening",
    "soon after noon",
    "late in the day",
    "when the lamps were lit",
    "in the middle of the morning",
    "just before dark",
    "after supper",
    "as the bells rang",
    "on the way home",
    "when the rain stopped",
    "that same afternoon",
    "the next day",
    "at the end of the week",
    "on the first dry day",
    "a little after sunrise",
};
constexpr SV kEarly[] = {
    "before breakfast",
    "at first light",
    "before anyone else was awake",
    "while the dew was still on the grass",
    "before the sun was over the trees",
    "as soon as there was light",
    "while the lamps were still burning",
    "when the cocks began",
};
constexpr SV kLate[] = {
    "towards evening", "late in the day",        "when the lamps were lit", "just before dark",
    "after supper",    "at the end of the week", "that same evening",       "as the light went",
    "in the end",      "at long last",           "when the moon was up",    "some days later",
};
constexpr SV kSpans[] = {
    "a week",
    "a fortnight",
    "two days",
    "the better part of a month",
    "a whole season",
    "three long days",
    "an afternoon",
    "half a year",
    "a day and a night",
    "some weeks",
    "ten days",
    "the whole of Lent",
};
constexpr SV kFew[] = {
    "two",   "three", "four", "five",    "six",     "seven",
    "eight", "nine",  "ten",  "a dozen", "several", "half a dozen",
};
constexpr SV kLooks[] = {
    "with a nod",         "with a smile",        "in a low voice",     "with a sigh",
    "quite calmly",       "in great surprise",   "with a laugh",       "rather crossly",
    "after some thought", "from the doorway",    "without looking up", "as if it were nothing",
    "very kindly",        "for the second time", "between two coughs",
};
constexpr SV kDistances[] = {
    "a mile",
    "two miles",
    "half a league",
    "no great way",
    "a stone's throw",
    "three fields",
    "a long day's ride",
    "a good hour's walk",
    "four miles",
    "the length of two hedges",
    "five miles",
};
constexpr SV kSayings[] = {
    "a late start makes a long road",
    "the hen that cackles has laid already",
    "good bread needs no bell",
    "a borrowed horse has hard hooves",
    "the patient hand ties the best knot",
    "rain never asked leave of anyone",
    "a shut mouth catches no flies",
    "even a slow river comes to the sea",
    "one good neighbour is worth a wall",
    "what is mended twice is loved twice",
    "a dry cloud makes the most thunder",
    "you cannot plough with a promise",
    "the broom that is new sweeps the corners",
    "old wood burns and old friends warm",
    "an empty cart makes the loudest noise",
    "the last pear is the sweetest",
    "every road is short in good company",
    "a cat in a hurry breaks the jug",
    "nobody ever drowned in a thimble",
    "the early lamb meets the frost",
};

constexpr SV kHeadings[] = {
    "The {^trade} of {town}",     "{hero} and the {^beast}",
    "A Letter from {town2}",      "How {hero} Came to {town}",
    "The Bridge over {river}",    "What {elder} Remembered",
    "{hero} and {friend}",        "A {^season} in {town}",
    "The {^beast} of {elder}",    "{friend} the {^trade2}",
    "On the Road to {town2}",     "The Year the {^trade} Stayed Away",
    "{child} in the Woods",       "The Lamp in {elder}'s Window",
    "From {town} to {town2}",     "The Quarrel at {town}",
    "What Was Found near {wood}", "{hero} Goes to Market",
    "The House beside {^river}",  "A Present for {child}",
};

constexpr SV kAsides[] = {
    "Nobody answered.",
    "It was soon done.",
    "The wind dropped.",
    "So it was agreed.",
    "{hero} laughed.",
    "{friend} said nothing.",
    "That was an odd thing to say.",
    "{child} clapped and ran on.",
    "The {beast} took no notice.",
    "There was no hurry.",
    "{hero} was {mood} that day.",
    "{friend} looked {mood}.",
    "{elder} seemed {mood} too.",
    "Somewhere there was {sound}.",
    "The air smelled of {smell}.",
    "There was {smell} in the air, and {sound} far away.",
    "They both thought it over {adverb}.",
    "{hero} counted to ten and tried again.",
    "{town} is a small place, and the news went round it {time}.",
    "As they say in {town}, {saying}.",
    "\"Well,\" said {elder} {look}, \"{saying}.\"",
    "\"{saying},\" said {friend} {look}.",
    "\"Do you think so?\" said {hero} {look}.",
    "\"I never heard of such a thing,\" said {elder} {look}.",
    "\"Then we had better begin,\" said {friend} {look}.",
    "\"Mind the step,\" said {hero} {look}.",
    "\"You may ask at {place},\" said {elder} {look}.",
    "\"Is it far?\" asked {child}, who was {mood}.",
    "\"It is {distance},\" said {friend} {look}.",
    "\"Not before {child} has eaten,\" said {elder} {look}.",
    "{hero} nodded {adverb}.",
    "{friend} whistled {adverb}.",
    "The sky was {sky}, and that was a comfort.",
    "By then the light was {sky}.",
    "{hero} had known {friend} for many years, and still {he} was surprised.",
    "{child} wanted to know why, and nobody could tell {chim}.",
    "From {place} came {sound}, and then it was quiet again.",
    "A {bird} flew up from the {tree}.",
    "The {bird} in the {tree} went on singing.",
    "{hero} wiped {his} hands and looked about.",
    "{friend} pulled off {fhis} {clothes} and hung it on a nail.",
    "It had been so since {event}, and it is so still.",
    "All this took {span}.",
    "It took {span}, or a little less.",
    "In {town2}, people do it otherwise.",
    "The {trade} had a good name in {town}, and {hero} meant to keep it.",
    "A {trade2} learns to wait, and {friend} had learned it well.",
    "{elder} used to say that {saying}.",
    "On the sill stood {few} {adj} jugs, and {smell} hung over everything.",
    "They passed {few} people on the way, all of them {mood}.",
    "For a while there was only {sound}.",
    "The {beast} yawned.",
    "{child} fed the {beast} a crust.",
    "{hero} and {friend} shared the last of {dish}.",
    "{river} ran on past {town}, as it always had.",
    "Beyond {wood} the road turned towards {town2}.",
};

constexpr SV kMen[] = {
    "Abel",   "Ambrose", "Barnaby", "Bertram", "Clement",  "Cuthbert", "Edmund",  "Enoch",
    "Felix",  "Gideon",  "Gilbert", "Hubert",  "Humphrey", "Jasper",   "Jeremy",  "Jonas",
    "Josiah", "Lambert", "Luke",    "Matthew", "Miles",    "Nathan",   "Oliver",  "Percy",
    "Philip", "Roger",   "Roland",  "Rupert",  "Silas",    "Simon",    "Stephen", "Tobias",
    "Walter", "Wilfred", "Giles",   "Ned",     "Crispin",  "Jethro",   "Alban",   "Reuben",
};
constexpr SV kWomen[] = {
    "Agnes",    "Beatrice", "Cecily",  "Constance", "Dorothy", "Edith",     "Eleanor", "Esther",
    "Flora",    "Hannah",   "Harriet", "Hester",    "Jane",    "Joan",      "Judith",  "Lettice",
    "Lucy",     "Mabel",    "Margery", "Martha",    "Matilda", "Millicent", "Nell",    "Patience",
    "Phyllis",  "Prudence", "Rachel",  "Rosamund",  "Ruth",    "Sabina",    "Susan",   "Tabitha",
    "Winifred", "Bridget",  "Charity", "Hilda",     "Isabel",  "Maud",      "Rebecca", "Sibyl",
};

constexpr WordList kLists[] = {
    {"town", Scope::kChapter, kTowns},
    {"river", Scope::kChapter, kRivers},
    {"wood", Scope::kChapter, kWoods},
    {"elder", Scope::kChapter, kElders},
    {"trade", Scope::kChapter, kTrades},
    {"beast", Scope::kChapter, kBeasts},
    {"season", Scope::kChapter, kSeasons},
    {"thing", Scope::kParagraph, kThings},
    {"part", Scope::kParagraph, kParts},
    {"tool", Scope::kParagraph, kTools},
    {"good", Scope::kParagraph, kGoods},
    {"dish", Scope::kParagraph, kDishes},
    {"plant", Scope::kParagraph, kPlants},
    {"bird", Scope::kParagraph, kBirds},
    {"tree", Scope::kParagraph, kTrees},
    {"place", Scope::kParagraph, kPlaces},
    {"inn", Scope::kParagraph, kInns},
    {"kin", Scope::kParagraph, kKin},
    {"stranger", Scope::kParagraph, kStrangers},
    {"clothes", Scope::kParagraph, kClothes},
    {"colour", Scope::kParagraph, kColours},
    {"event", Scope::kParagraph, kEvents},
    {"office", Scope::kParagraph, kOffices},
    {"feast", Scope::kParagraph, kFeasts},
    {"tune", Scope::kParagraph, kTunes},
    {"find", Scope::kParagraph, kFinds},
    {"ailment", Scope::kParagraph, kAilments},
    {"lesson", Scope::kParagraph, kLessons},
    {"sky", Scope::kSentence, kSkies},
    {"sound", Scope::kSentence, kSounds},
    {"smell", Scope::kSentence, kSmells},
    {"mood", Scope::kSentence, kMoods},
    {"adverb", Scope::kSentence, kAdverbs},
    {"adj", Scope::kSentence, kAdjectives},
    {"time", Scope::kSentence, kTimes},
    {"span", Scope::kSentence, kSpans},
    {"early", Scope::kSentence, kEarly},
    {"late", Scope::kSentence, kLate},
    {"few", Scope::kSentence, kFew},
    {"look", Scope::kSentence, kLooks},
    {"distance", Scope::kSentence, kDistances},
    {"saying", Scope::kSentence, kSayings},
};

}  // namespace

std::span<const WordList> WordLists() {
  return kLists;
}
Words Headings() {
  return kHeadings;
}
Words Asides() {
  return kAsides;
}
Words MenNames() {
  return kMen;
}
Words WomenNames() {
  return kWomen;
}

}  // namespace omnikv::prose
